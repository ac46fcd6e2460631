"""The second level of the prefix cache: which contents host memory holds, and which copies are under way.

Policy only: no tensors. What is decided here, `block_copier.py` does on each rank.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.block_manager import Block

# The saves of so many steps are under way at most.
_MAX_SAVES_UNDER_WAY = 2

Key = tuple[int, bytes]  # what a content is: the identity of its parent's content, and its tokens


@dataclass(frozen=True)
class BlockCopies:
    """What each rank begins to copy before a step, and what may be relied on.

    Attributes:
        ticket: number of these copies, higher than that of all before.
        loads_done, saves_done: loads (and saves) of tickets up to this one count as finished: whatever is launched
            from now on, copies included, comes after them.
        loads: pairs (slot of the host memory, block of the device).
        saves: pairs (block of the device, slot of the host memory).
    """

    ticket: int
    loads_done: int
    saves_done: int
    loads: list[tuple[int, int]]
    saves: list[tuple[int, int]]


@dataclass(slots=True)
class HostBlock:
    """A content that is, or will soon be, in a slot of host memory, under the identity that it has on the device."""

    slot: int
    content_id: int
    parent_content_id: int
    token_bytes: bytes
    save_ticket: int
    load_ticket: int = 0  # of its last load


class HostCache:
    """Decides which contents are saved, kept and loaded; the `BlockManager` that owns it says what happens to blocks.

    Saving: before a step, some of the next blocks to be reused are copied in the background, if their content is not
    kept yet. In a pool so full that few blocks are free, freed ones are reused at once: then contents are saved while
    their sequences run, in the order in which they were published (unless the host holds no more than the pool: it
    would be full of what the pool has, too). Nothing waits for a save. A block that is needed
    before its copy is finished is reused all the same; its save is given up there and then, so that what the copy
    leaves in the slot never counts as that content. The slot can be given to another save at once, since a rank does
    its saves one after the other. Of the free blocks, those that have the longest to go are saved first, and fewer at
    a time once saves were given up: where copying is slower than blocks are reused, some are saved in time rather than
    all too late.

    Loading: a sequence that is admitted gets blocks for what the host has of its prefix, which are published at once,
    and waits (`Sequence.load_ticket`) until all loads into blocks of its table are finished, its own and others'. That
    holds for whoever gets such a block, even to overwrite it, so a block may be freed in the middle of a load. A slot
    is not reused while it is loaded from.

    Of the contents that are kept, the one goes first that was least recently saved, loaded, or evicted from the
    device. Identities (`content_id`) go with the contents: one that is computed again while the host has it gets the
    same, so that its children, wherever they are, can still be reached.
    """

    def __init__(self, num_slots: int, *, max_copies: int, min_load_blocks: int = 1) -> None:
        """
        Args:
            num_slots: blocks that the host memory holds.
            max_copies: most loads, and most saves, that are begun before one step (see `max_copies_a_step`).
            min_load_blocks: fewest consecutive blocks that are copied faster than computed.
        """
        self.num_slots = num_slots
        self.max_copies = max_copies
        self.min_load_blocks = min_load_blocks
        # Blocks from the head of the free list that are worth saving: two steps' worth. So few of the slots that what
        # is saved ahead is never evicted here before it is on the device, to be saved again and again.
        self.lookahead = max(1, min(2 * max_copies, num_slots // 4))
        self.num_saved_blocks = self.num_loaded_blocks = self.num_loaded_tokens = 0
        self._ticket = 0  # of the last copies begun
        self._num_at_once = max_copies  # saves that are begun before a step
        self.reset()

    def reset(self) -> None:
        """Forgets every content. Copies under way count as finished: what is launched next comes after them."""
        self._kept: OrderedDict[Key, HostBlock] = OrderedDict()  # the first goes first
        self._saving: dict[int, HostBlock] = {}  # by the device's block, in the order of their tickets
        self._free_slots = list(reversed(range(self.num_slots)))
        self._unsaved: dict[int, int] = {}  # blocks published -> step before which they were; the oldest first
        self._step = 0
        self._num_given_up: dict[int, int] = {}  # by ticket, of the saves under way
        self._loads: list[tuple[int, int]] = []  # to be begun before the next step
        self._last_load = 0  # ticket
        self._announced: dict[Key, int] = {}
        self._loads_done = self._saves_done = self._ticket
        self._told = (-1, -1)  # what the ranks know to be finished

    def find(self, parent_content_id: int, token_bytes: bytes) -> HostBlock | None:
        return self._kept.get((parent_content_id, token_bytes))

    def can_load(self, num_blocks: int) -> bool:
        """Whether so many more loads may begin before the next step. One sequence's always may."""
        return not self._loads or len(self._loads) + num_blocks <= self.max_copies

    @property
    def is_copying(self) -> bool:
        """Whether anything may be under way, in either direction."""
        return self.is_loading or bool(self._num_given_up)

    @property
    def is_loading(self) -> bool:
        """Whether any load may be under way: a sequence may wait for it, running or about to be admitted."""
        return self.is_under_way(self._last_load)

    def is_under_way(self, load_ticket: int) -> bool:
        """Whether loads of a ticket are not known to be finished."""
        return load_ticket > self._loads_done

    def load(self, host_block: HostBlock, block_id: int) -> int:
        """Loads a content into a block before the next step; returns the ticket."""
        self._loads.append((host_block.slot, block_id))
        self._last_load = host_block.load_ticket = self._ticket + 1
        self._kept.move_to_end((host_block.parent_content_id, host_block.token_bytes))
        self.num_loaded_blocks += 1
        self.num_loaded_tokens += len(host_block.token_bytes) // 4
        return host_block.load_ticket

    def announce(self, parent_content_id: int, token_bytes: bytes, load_ticket: int) -> None:
        """Notes that a sequence will compute and publish this content once its loads are finished."""
        self._announced[parent_content_id, token_bytes] = load_ticket

    def is_announced(self, parent_content_id: int, token_bytes: bytes) -> bool:
        return self.is_under_way(self._announced.get((parent_content_id, token_bytes), 0))

    def published(self, block: "Block") -> None:
        """A content is published that the host doesn't have; it is computed by the next step at the latest."""
        self._unsaved[block.block_id] = self._step

    def evicted(self, block: "Block") -> None:
        """The device gives up a block's content."""
        self._unsaved.pop(block.block_id, None)
        if (unfinished := self._saving.pop(block.block_id, None)) is not None:
            self._free_slots.append(unfinished.slot)
            self._num_given_up[unfinished.save_ticket] += 1
        elif (key := (block.parent_content_id, block.token_bytes)) in self._kept:
            self._kept.move_to_end(key)

    def finish(self, loads_done: int, saves_done: int) -> None:
        """Takes over up to which tickets the copies are finished."""
        if loads_done > self._loads_done:
            self._loads_done = loads_done
            self._announced = {key: ticket for key, ticket in self._announced.items() if ticket > loads_done}
        if saves_done > self._saves_done:
            self._saves_done = saves_done
            self._keep_saved()

    def begin(self, blocks: "list[Block]", free_block_ids: Iterable[int]) -> BlockCopies | None:
        """The copies to begin before the step just scheduled; None if there are none, and nothing has finished since
        the last.

        Args:
            blocks: the device's.
            free_block_ids: in the order in which they will be reused.
        """
        loads, self._loads = self._loads, []
        is_idle = len(self._num_given_up) < _MAX_SAVES_UNDER_WAY
        saves = self._begin_saves(blocks, list(islice(free_block_ids, self.lookahead))) if is_idle else []
        self._step += 1
        done = (self._loads_done, self._saves_done)
        if not loads and not saves and done == self._told:
            return None
        self._told = done
        self._ticket += 1
        return BlockCopies(self._ticket, *done, loads, saves)

    def check_integrity(self, blocks: "Iterable[Block]") -> None:
        """Raises RuntimeError if an invariant is broken. `blocks` are the device's."""
        by_id = {block.block_id: block for block in blocks}
        kept = [*self._kept.values(), *self._saving.values()]
        if sorted([*self._free_slots, *(host_block.slot for host_block in kept)]) != list(range(self.num_slots)):
            raise RuntimeError("a slot of the host cache is lost, or has two contents")
        for key, host_block in self._kept.items():
            if key != (host_block.parent_content_id, host_block.token_bytes):
                raise RuntimeError(f"{host_block} is kept as {key}")
        for block_id, host_block in self._saving.items():
            if by_id[block_id].content_id != host_block.content_id:
                raise RuntimeError(f"{by_id[block_id]} is saved as {host_block}")
        for block_id in self._unsaved:
            block = by_id[block_id]
            if (
                not block.content_id
                or block_id in self._saving
                or self.find(block.parent_content_id, block.token_bytes)
            ):
                raise RuntimeError(f"{block} has nothing to save")
        for block in by_id.values():
            same = self.find(block.parent_content_id, block.token_bytes) if block.content_id else None
            if same is not None and same.content_id != block.content_id:
                raise RuntimeError(f"{block} and {same}: one content under two identities")

    def _begin_saves(self, blocks: "list[Block]", next_reused: list[int]) -> list[tuple[int, int]]:
        saves: list[tuple[int, int]] = []
        candidates: Iterable[int] = reversed(next_reused)
        if len(next_reused) < self.lookahead and self.num_slots > len(blocks):
            # What was published for the step that is about to be launched isn't computed when the saves begin.
            computed = takewhile(lambda block_id: self._unsaved[block_id] < self._step, self._unsaved)
            candidates = [*candidates, *islice(computed, self._num_at_once)]
        ticket = self._ticket + 1
        for block_id in candidates:
            if len(saves) == self._num_at_once:
                break
            # What is being loaded into a block is kept for as long.
            block = blocks[block_id]
            is_kept = self.find(block.parent_content_id, block.token_bytes) is not None
            if not block.content_id or is_kept or block_id in self._saving:
                continue
            slot = self._take_slot()
            if slot is None:
                break
            host_block = HostBlock(slot, block.content_id, block.parent_content_id, block.token_bytes, ticket)
            self._saving[block_id] = host_block
            self._unsaved.pop(block_id, None)
            saves.append((block_id, slot))
        if saves:
            self._num_given_up[ticket] = 0
        return saves

    def _keep_saved(self) -> None:
        """Keeps what was saved up to `_saves_done`, and adapts how much is saved at once."""
        while self._saving:
            block_id, host_block = next(iter(self._saving.items()))
            if host_block.save_ticket > self._saves_done:
                break
            del self._saving[block_id]
            self._kept[host_block.parent_content_id, host_block.token_bytes] = host_block
            self.num_saved_blocks += 1
        for ticket in [ticket for ticket in self._num_given_up if ticket <= self._saves_done]:
            if self._num_given_up.pop(ticket):
                self._num_at_once = max(1, self._num_at_once // 2)
            else:
                self._num_at_once = min(self.max_copies, 2 * self._num_at_once)

    def _take_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        if not self._kept:
            return None
        key, host_block = next(iter(self._kept.items()))
        if self.is_under_way(host_block.load_ticket):
            return None
        del self._kept[key]
        return host_block.slot


def max_copies_a_step(max_num_batched_tokens: int, max_model_len: int, block_size: int) -> int:
    """Most blocks that are loaded, and most that are saved, before one step: as many as a step can fill, so that saving
    keeps pace, and no fewer than a sequence has."""
    return -(-max(max_num_batched_tokens, max_model_len) // block_size)


def min_blocks_worth_copying(latency: float, seconds_to_copy: float, seconds_to_compute: float) -> int | None:
    """The crossover: fewest blocks that are copied to the device in less time than they are computed in.

    Args:
        latency: seconds that a copy takes beside those for its blocks.
        seconds_to_copy, seconds_to_compute: for one block.

    Returns:
        The smallest n with `latency + n * seconds_to_copy < n * seconds_to_compute`; None if there is none.
    """
    gain = seconds_to_compute - seconds_to_copy
    return int(latency / gain) + 1 if gain > 0 else None
