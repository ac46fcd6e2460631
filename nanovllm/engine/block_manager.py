"""Paged KV cache bookkeeping: which block belongs to whom, and which prefix each block holds."""

import bisect
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from nanovllm.engine.host_cache import BlockCopies, HostBlock, HostCache
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import CacheCounts


@dataclass(slots=True)
class Block:
    """One KV block. `content_id` is 0 while its content is private; a published content has its own number.
    `load_ticket` is that of the last load into it from host memory."""

    block_id: int
    ref_count: int = 0
    hash: int = 0
    content_id: int = 0
    parent_content_id: int = 0
    token_bytes: bytes = b""
    load_ticket: int = 0


class BlockManager:
    """Hands out KV blocks and shares those that hold equal prefixes.

    A full block of known tokens is *published* as soon as it is scheduled to be computed: its chained hash
    (xxh3 of its tokens, seeded with its parent's hash) leads to it, and a hit is taken only if the tokens and
    the identity of the parent's content agree too. Published blocks stay findable after they are freed, until
    they are reused: unpublished free blocks are reused first, then the least recently freed. With a `HostCache`,
    contents can outlive that, and come back.

    Invariants (see `check_integrity`): free + used = total; a block's `ref_count` is the number of tables
    that hold it, and it is free iff that is zero; the hash map holds exactly the published blocks.
    Every operation costs O(1) a block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        host_cache: HostCache | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.counts = CacheCounts()  # outlives `reset`
        self.host_cache = host_cache
        self.reset()

    def reset(self) -> None:
        """Frees every block and forgets every content."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]
        # The first goes first.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.hash_to_block_id: dict[int, int] = {}
        self.num_cached_free_blocks = 0  # free, and published
        self._next_content_id = 1
        if self.host_cache is not None:
            self.host_cache.reset()

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the published blocks that hold the sequence's longest cached prefix, at least one token short
        of the sequence: the last token is always recomputed, since its logits are wanted (and others, if theirs are:
        such a sequence gets blocks of its own, whose content stays private where it is published already)."""
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        parent = -seq.cache_salt
        for index in range(seq.num_reusable_tokens // self.block_size):
            block = self._find(self._block_hash(seq, index), parent, self._block_bytes(seq, index))
            if block is None:
                break
            found.append(block.block_id)
            parent = block.content_id
        return found

    def prefix_hash(self, seq: Sequence, num_blocks: int) -> int:
        """Chained hash of the sequence's first blocks, which are full of known tokens."""
        return self._block_hash(seq, num_blocks - 1)

    def is_cached(self, prefix_hash: int) -> bool:
        """Whether a prefix with this hash is published: by the hash alone, which will do to choose an order."""
        return prefix_hash in self.hash_to_block_id

    def find_offloaded_blocks(self, seq: Sequence, cached_block_ids: list[int]) -> list[HostBlock] | None:
        """What the host has of the sequence's prefix after its cached blocks, if copying that is faster than computing
        it. None if the sequence had better wait: what follows its cached blocks is about to be computed by another
        that waits for its own loads, or no more loads may begin before the next step."""
        host = self.host_cache
        if host is None:
            return []
        parent = self.blocks[cached_block_ids[-1]].content_id if cached_block_ids else -seq.cache_salt
        found: list[HostBlock] = []
        for index in range(len(cached_block_ids), seq.num_reusable_tokens // self.block_size):
            token_bytes = self._block_bytes(seq, index)
            if not found and host.is_announced(parent, token_bytes):
                return None
            host_block = host.find(parent, token_bytes)
            if host_block is None or self._find(self._block_hash(seq, index), parent, token_bytes):
                break
            found.append(host_block)
            parent = host_block.content_id
        if len(found) < host.min_load_blocks:
            return []
        return found if host.can_load(len(found)) else None

    def num_new_blocks(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        """Free blocks that `allocate` would take: those for uncomputed tokens, and cached ones without a holder."""
        num_idle = sum(self.blocks[block_id].ref_count == 0 for block_id in cached_block_ids)
        return self.num_blocks_for(seq.num_tokens) - len(cached_block_ids) + num_idle

    def allocate(self, seq: Sequence, cached_block_ids: list[int], offloaded: Iterable[HostBlock] = ()) -> None:
        """Gives a sequence without blocks a table for all its tokens, beginning with the cached blocks, then those that
        are to be loaded from the host.

        The caller has checked that `num_new_blocks` are free.
        """
        assert not seq.block_table and self.num_new_blocks(seq, cached_block_ids) <= self.num_free_blocks
        for block_id in cached_block_ids:  # first: so that the blocks taken below are not these
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_block_ids[block_id]
                self.num_cached_free_blocks -= 1
            block.ref_count += 1
        seq.block_table = array("i", cached_block_ids)
        seq.num_published_blocks = len(cached_block_ids)
        if cached_block_ids:
            seq.last_content_id = self.blocks[cached_block_ids[-1]].content_id
        for host_block in offloaded:
            seq.block_table.append(self._load(seq, host_block))
        self._count_lookup(seq, seq.num_published_blocks)
        seq.num_computed_tokens = seq.num_published_blocks * self.block_size
        for _ in range(self.num_blocks_for(seq.num_tokens) - seq.num_published_blocks):
            seq.block_table.append(self._take_free_block())
        if self.host_cache is not None:
            seq.load_ticket = max(self.blocks[block_id].load_ticket for block_id in seq.block_table)
            index = seq.num_published_blocks
            if self.is_loading(seq) and (index + 1) * self.block_size <= len(seq.token_ids):
                self.host_cache.announce(seq.last_content_id, self._block_bytes(seq, index), seq.load_ticket)

    def is_loading(self, seq: Sequence) -> bool:
        """Whether a load from the host into one of the sequence's blocks may be under way: nothing of it can be
        computed."""
        return self.host_cache is not None and self.host_cache.is_under_way(seq.load_ticket)

    def begin_copies(self) -> BlockCopies | None:
        """The copies between device and host that are to begin before the step just scheduled, if there are any."""
        if self.host_cache is None:
            return None
        return self.host_cache.begin(self.blocks, self.free_block_ids)

    def _count_lookup(self, seq: Sequence, num_found: int) -> None:
        """Counts what a prompt found. A preempted sequence that comes back mostly finds what it has computed itself."""
        if self.enable_prefix_caching and seq.num_cached_tokens is None:
            self.counts.num_hit_blocks += num_found
            self.counts.num_missed_blocks += seq.num_reusable_tokens // self.block_size - num_found

    def num_shared_blocks(self, seq: Sequence) -> int:
        """Leading blocks of a sequence's table that others hold too: freeing it would not free them.

        Sequences share prefixes, so along a table the number of holders (all but always) falls: bisection finds
        where it reaches one.
        """
        return bisect.bisect_left(seq.block_table, True, key=lambda block_id: self.blocks[block_id].ref_count == 1)

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is room for the KV of one more token."""
        return seq.num_computed_tokens < len(seq.block_table) * self.block_size or bool(self.free_block_ids)

    def append(self, seq: Sequence) -> None:
        """Makes room for the KV of one more token; the caller has asked `can_append`."""
        if seq.num_computed_tokens >= len(seq.block_table) * self.block_size:
            seq.block_table.append(self._take_free_block())
            seq.load_ticket = max(seq.load_ticket, self.blocks[seq.block_table[-1]].load_ticket)

    def publish(self, seq: Sequence) -> None:
        """Makes the sequence's blocks findable that are full of known tokens and computed or scheduled to be."""
        if not self.enable_prefix_caching:
            return
        num_full_blocks = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        for index in range(seq.num_published_blocks, num_full_blocks):
            block_hash, token_bytes = self._block_hash(seq, index), self._block_bytes(seq, index)
            block = self._find(block_hash, seq.last_content_id, token_bytes)
            if block is None:
                block = self.blocks[seq.block_table[index]]
                self._set_content(block, block_hash, seq.last_content_id, token_bytes)
            # Another block may hold the same content already: then this one stays private, and the chain
            # goes on from the published one.
            seq.last_content_id = block.content_id
        seq.num_published_blocks = max(seq.num_published_blocks, num_full_blocks)

    def free(self, seq: Sequence) -> None:
        """Takes all blocks from a sequence. Of the published ones, its last is the first to be reused."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_block_ids[block_id] = None
                if block.content_id:
                    self.num_cached_free_blocks += 1
                else:
                    self.free_block_ids.move_to_end(block_id, last=False)
        seq.block_table = array("i")
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0
        seq.last_content_id = -seq.cache_salt
        seq.load_ticket = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises RuntimeError if an invariant is broken. `sequences` are all that may hold blocks."""
        sequences = list(sequences)
        holders = Counter(block_id for seq in sequences for block_id in seq.block_table)
        if unknown := (holders.keys() | self.free_block_ids.keys()) - set(range(self.num_blocks)):
            raise RuntimeError(f"blocks {sorted(unknown)} don't exist")
        for block in self.blocks:
            if block.ref_count != holders[block.block_id]:
                raise RuntimeError(f"{block}: held by {holders[block.block_id]} tables")
            if (block.ref_count == 0) != (block.block_id in self.free_block_ids):
                raise RuntimeError(f"{block}: free list and reference count disagree")
            if bool(block.content_id) != (self.hash_to_block_id.get(block.hash) == block.block_id):
                raise RuntimeError(f"{block}: hash map and content disagree")
        for seq in sequences:
            for index, block_id in enumerate(seq.block_table):
                block = self.blocks[block_id]
                if block.content_id and block.token_bytes != self._block_bytes(seq, index):
                    raise RuntimeError(f"{block}: sequence {seq.seq_id} has other tokens at block {index}")
        if len(self.hash_to_block_id) != sum(block.content_id != 0 for block in self.blocks):
            raise RuntimeError("the hash map holds blocks that are not published")
        num_cached_free = sum(block.content_id != 0 and block.ref_count == 0 for block in self.blocks)
        if num_cached_free != self.num_cached_free_blocks:
            raise RuntimeError(f"{num_cached_free} free blocks are published, counted as {self.num_cached_free_blocks}")
        if self.host_cache is not None:
            self.host_cache.check_integrity(self.blocks)

    def _find(self, block_hash: int, parent_content_id: int, token_bytes: bytes) -> Block | None:
        block_id = self.hash_to_block_id.get(block_hash)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        is_same = block.parent_content_id == parent_content_id and block.token_bytes == token_bytes
        return block if is_same else None

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if block.content_id:
            self._clear_content(block)
            self.num_cached_free_blocks -= 1
            self.counts.num_evicted_blocks += 1
        block.ref_count = 1
        return block_id

    def _load(self, seq: Sequence, host_block: HostBlock) -> int:
        """Takes a free block, publishes in it the next content of the sequence's prefix, and begins to load that."""
        assert self.host_cache is not None
        block = self.blocks[self._take_free_block()]
        block_hash = self._block_hash(seq, seq.num_published_blocks)
        self._set_content(block, block_hash, seq.last_content_id, host_block.token_bytes)
        block.load_ticket = self.host_cache.load(host_block, block.block_id)
        seq.last_content_id = block.content_id
        seq.num_published_blocks += 1
        return block.block_id

    def _set_content(self, block: Block, block_hash: int, parent_content_id: int, token_bytes: bytes) -> None:
        previous = self.hash_to_block_id.get(block_hash)
        if previous is not None:  # a colliding hash, or the orphan of a parent that was evicted
            self._clear_content(self.blocks[previous])
        block.hash, block.parent_content_id, block.token_bytes = block_hash, parent_content_id, token_bytes
        host = self.host_cache
        host_block = host.find(parent_content_id, token_bytes) if host is not None else None
        if host_block is not None:
            block.content_id = host_block.content_id
        else:
            block.content_id = self._next_content_id
            self._next_content_id += 1
            if host is not None:
                host.published(block)
        self.hash_to_block_id[block_hash] = block.block_id

    def _clear_content(self, block: Block) -> None:
        if self.host_cache is not None:
            self.host_cache.evicted(block)
        del self.hash_to_block_id[block.hash]
        block.hash = block.content_id = block.parent_content_id = 0
        block.token_bytes = b""
        if block.block_id in self.free_block_ids:
            self.num_cached_free_blocks -= 1
            self.free_block_ids.move_to_end(block.block_id, last=False)

    def _block_bytes(self, seq: Sequence, index: int) -> bytes:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()

    def _block_hash(self, seq: Sequence, index: int) -> int:
        while len(seq.block_hashes) <= index:
            parent_hash = seq.block_hashes[-1] if seq.block_hashes else seq.cache_salt
            seq.block_hashes.append(_hash(self._block_bytes(seq, len(seq.block_hashes)), parent_hash))
        return seq.block_hashes[index]


def _hash(token_bytes: bytes, parent_hash: int) -> int:
    return xxhash.xxh3_64_intdigest(token_bytes, seed=parent_hash)
