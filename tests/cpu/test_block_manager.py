"""The block manager against a naive model, its eviction order, its sharing rules, and its integrity check."""

import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanovllm.engine import block_manager as block_manager_module
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from tests.cpu.policies import make_sequence

REAL_HASH = block_manager_module._hash
BLOCK_SIZE = 4


# --- the state machine ------------------------------------------------------------------------------------------


@dataclass
class Published:
    """A content that the naive cache knows: the whole prefix, not only the block's own tokens."""

    block_id: int
    salt: int
    prefix: tuple[int, ...]
    hash: int
    parent: "Published | None"


@dataclass
class Holder:
    """What the naive model knows of one sequence."""

    seq: Sequence
    table: list[int] = field(default_factory=list)
    num_published: int = 0
    last: Published | None = None  # the content of its last published block


class NaivePool:
    """Block bookkeeping in lists that are searched from end to end.

    `free` is in the order of reuse. `published` may keep a content whose parent has gone; nothing leads to it then.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.published: list[Published] = []
        self.num_tables = [0] * num_blocks

    def prefix(self, seq: Sequence, num_blocks: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[: num_blocks * self.block_size])

    def chained_hash(self, prefix: tuple[int, ...], salt: int) -> int:
        value = salt
        for start in range(0, len(prefix), self.block_size):
            value = block_manager_module._hash(array("i", prefix[start : start + self.block_size]).tobytes(), value)
        return value

    def content_of(self, block_id: int) -> Published | None:
        return next((content for content in self.published if content.block_id == block_id), None)

    def child(self, parent: Published | None, seq: Sequence, num_blocks: int) -> Published | None:
        """The known content that continues `parent` to the sequence's first `num_blocks` blocks."""
        for content in self.published:
            is_same = content.salt == seq.cache_salt and content.prefix == self.prefix(seq, num_blocks)
            if is_same and content.parent is parent:
                return content
        return None

    def find(self, seq: Sequence) -> list[Published]:
        found: list[Published] = []
        while (len(found) + 1) * self.block_size < len(seq.token_ids):
            content = self.child(found[-1] if found else None, seq, len(found) + 1)
            if content is None:
                break
            found.append(content)
        return found

    def take(self) -> int:
        block_id = self.free.pop(0)
        content = self.content_of(block_id)
        if content is not None:
            self.published.remove(content)
        self.num_tables[block_id] += 1
        return block_id

    def allocate(self, holder: Holder) -> None:
        found = self.find(holder.seq)
        for content in found:
            if content.block_id in self.free:
                self.free.remove(content.block_id)
            self.num_tables[content.block_id] += 1
        holder.table = [content.block_id for content in found]
        while len(holder.table) * self.block_size < holder.seq.num_tokens:
            holder.table.append(self.take())
        holder.num_published = len(found)
        holder.last = found[-1] if found else None

    def publish(self, holder: Holder) -> None:
        seq = holder.seq
        while (holder.num_published + 1) * self.block_size <= min(seq.num_computed_tokens, len(seq.token_ids)):
            num_blocks = holder.num_published + 1
            content = self.child(holder.last, seq, num_blocks)
            if content is None:
                prefix = self.prefix(seq, num_blocks)
                value = self.chained_hash(prefix, seq.cache_salt)
                for other in [other for other in self.published if other.hash == value]:
                    self.unpublish(other)
                content = Published(holder.table[num_blocks - 1], seq.cache_salt, prefix, value, holder.last)
                self.published.append(content)
            holder.last, holder.num_published = content, num_blocks

    def unpublish(self, content: Published) -> None:
        """One hash leads to one content. A free block without content goes before all that have one."""
        self.published.remove(content)
        if content.block_id in self.free:
            self.free.remove(content.block_id)
            self.free.insert(0, content.block_id)

    def release(self, holder: Holder) -> None:
        for block_id in reversed(holder.table):
            self.num_tables[block_id] -= 1
            if self.num_tables[block_id] == 0:
                if self.content_of(block_id) is None:
                    self.free.insert(0, block_id)
                else:
                    self.free.append(block_id)
        holder.table, holder.num_published, holder.last = [], 0, None


class BlockManagerMachine(RuleBasedStateMachine):
    """Drives a block manager as the scheduler does, with sequences over two tokens so that prefixes collide.

    In most runs the hash is cut to a few values: every wrong hit that only its 64 bits would prevent shows then.
    """

    @initialize(
        num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), num_hashes=st.sampled_from([2**64, 7, 2, 1])
    )
    def start(self, num_blocks: int, block_size: int, num_hashes: int) -> None:
        def cut_hash(token_bytes: bytes, parent_hash: int) -> int:
            return REAL_HASH(token_bytes, parent_hash) % num_hashes

        self.patch = mock.patch.object(block_manager_module, "_hash", cut_hash)
        self.patch.start()
        self.manager = BlockManager(num_blocks, block_size)
        self.naive = NaivePool(num_blocks, block_size)
        self.holders: list[Holder] = []
        self.num_made = 0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.stop()

    def pick(self, data: st.DataObject, choices: list[Holder]) -> Holder:
        return choices[data.draw(st.integers(0, len(choices) - 1), label="sequence")]

    @property
    def idle(self) -> list[Holder]:
        return [holder for holder in self.holders if not holder.table]

    @property
    def unfinished(self) -> list[Holder]:
        return [h for h in self.holders if h.table and h.seq.num_computed_tokens < h.seq.num_tokens]

    @property
    def complete(self) -> list[Holder]:
        return [h for h in self.holders if h.table and h.seq.num_computed_tokens == h.seq.num_tokens]

    @precondition(lambda self: len(self.holders) < 8)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from([0, 0, 5]))
    def add(self, prompt: list[int], salt: int) -> None:
        self.holders.append(Holder(make_sequence(self.num_made, prompt, max_tokens=100, cache_salt=salt)))
        self.num_made += 1

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        holder = self.pick(data, self.idle)
        seq, manager, naive = holder.seq, self.manager, self.naive
        cached = manager.find_cached_blocks(seq)
        expected = naive.find(seq)
        assert cached == [content.block_id for content in expected]
        assert len(cached) * manager.block_size < seq.num_tokens, "no token is left to compute"
        num_blocks = -(-seq.num_tokens // manager.block_size)
        num_idle = sum(block_id in naive.free for block_id in cached)
        assert manager.num_new_blocks(seq, cached) == num_blocks - len(cached) + num_idle
        if num_blocks - len(cached) + num_idle > len(naive.free):
            return
        manager.allocate(seq, cached)
        naive.allocate(holder)
        assert seq.num_computed_tokens == len(cached) * manager.block_size

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A prefill chunk, or the decode of a token that may not be known yet."""
        holder = self.pick(data, self.unfinished)
        seq, manager, naive = holder.seq, self.manager, self.naive
        num_tokens = data.draw(st.integers(1, seq.num_tokens - seq.num_computed_tokens), label="tokens")
        has_room = len(holder.table) * manager.block_size > seq.num_computed_tokens
        assert manager.can_append(seq) == (has_room or bool(naive.free))
        if not has_room:
            if not naive.free:
                return
            holder.table.append(naive.take())
        manager.append(seq)
        seq.num_computed_tokens += num_tokens
        manager.publish(seq)
        naive.publish(holder)

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), token_id=st.integers(0, 1), is_known=st.booleans())
    def sample(self, data: st.DataObject, token_id: int, is_known: bool) -> None:
        seq = self.pick(data, self.complete).seq
        if is_known and not seq.num_in_flight:
            seq.token_ids.append(token_id)
        elif seq.num_in_flight < 2:
            seq.num_in_flight += 1

    @precondition(lambda self: any(holder.seq.num_in_flight for holder in self.holders))
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def learn(self, data: st.DataObject, token_id: int) -> None:
        """The host reads a token that was in flight."""
        holder = self.pick(data, [holder for holder in self.holders if holder.seq.num_in_flight])
        holder.seq.num_in_flight -= 1
        holder.seq.token_ids.append(token_id)
        self.manager.publish(holder.seq)
        self.naive.publish(holder)

    @precondition(lambda self: any(holder.table for holder in self.holders))
    @rule(data=st.data(), is_preempted=st.booleans())
    def release(self, data: st.DataObject, is_preempted: bool) -> None:
        """A sequence ends, or is preempted and may come back with all its known tokens."""
        holder = self.pick(data, [holder for holder in self.holders if holder.table])
        self.manager.free(holder.seq)
        self.naive.release(holder)
        assert holder.seq.num_computed_tokens == 0
        holder.seq.num_in_flight = 0
        if not is_preempted:
            self.holders.remove(holder)

    @precondition(lambda self: self.holders)
    @rule()
    def reset(self) -> None:
        """A launch failed: everybody is gone, and nothing may be left of them."""
        self.manager.reset()
        self.naive = NaivePool(self.manager.num_blocks, self.manager.block_size)
        self.holders.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, naive = self.manager, self.naive
        manager.check_integrity(holder.seq for holder in self.holders)
        assert list(manager.free_block_ids) == naive.free, "order of reuse"
        assert [block.ref_count for block in manager.blocks] == naive.num_tables
        assert manager.num_free_blocks == len(naive.free)
        assert manager.num_used_blocks == sum(count > 0 for count in naive.num_tables)
        assert [list(holder.seq.block_table) for holder in self.holders] == [holder.table for holder in self.holders]
        published = {block.block_id: block.token_bytes for block in manager.blocks if block.content_id}
        size = manager.block_size
        assert published == {c.block_id: array("i", c.prefix[-size:]).tobytes() for c in naive.published}
        for holder in self.holders:  # what is not taken may not lie ready wrongly either
            assert manager.find_cached_blocks(holder.seq) == [content.block_id for content in naive.find(holder.seq)]


def test_agrees_with_naive_model() -> None:
    """Any difference from the naive model: a lost or doubled block, a wrong hit, another order of reuse."""
    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(max_examples=150, stateful_step_count=50, deadline=None, database=None, derandomize=True),
    )


# --- direct tests -----------------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, BLOCK_SIZE)


@pytest.fixture
def same_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block has the same hash."""
    monkeypatch.setattr(block_manager_module, "_hash", lambda token_bytes, parent_hash: 1)


def start(manager: BlockManager, prompt: list[int], *, seq_id: int = 0, cache_salt: int = 0) -> Sequence:
    """A sequence with blocks, nothing computed but what the cache had."""
    seq = make_sequence(seq_id, prompt, cache_salt=cache_salt)
    manager.allocate(seq, manager.find_cached_blocks(seq))
    return seq


def compute(manager: BlockManager, seq: Sequence) -> Sequence:
    seq.num_computed_tokens = seq.num_tokens
    manager.publish(seq)
    return seq


def finish(manager: BlockManager, prompt: list[int], **kwargs: int) -> list[int]:
    """Runs a prompt and frees it; its block table."""
    seq = compute(manager, start(manager, prompt, **kwargs))
    table = list(seq.block_table)
    manager.free(seq)
    return table


def decode(manager: BlockManager, seq: Sequence, token_id: int) -> None:
    """Appends a known token and computes it."""
    seq.token_ids.append(token_id)
    manager.append(seq)
    seq.num_computed_tokens += 1
    manager.publish(seq)


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    """Enough tokens to fill `num_blocks` blocks, all different."""
    return list(range(first, first + num_blocks * BLOCK_SIZE))


def test_reuse_starts_in_id_order(manager: BlockManager) -> None:
    assert list(start(manager, tokens(3)).block_table) == [0, 1, 2]


def test_eviction_order(manager: BlockManager) -> None:
    """Reusing a cached block while an empty one is free, or a prefix's head before its tail, wastes the cache."""
    first = finish(manager, [*tokens(2), 99])  # blocks 0, 1 cached; 2 is half full
    second = finish(manager, tokens(2, first=100))  # takes 2, 3
    assert (first, second) == ([0, 1, 2], [2, 3])
    assert list(manager.free_block_ids) == [4, 5, 6, 7, 1, 0, 3, 2]

    # A hit moves a prefix to the back of the queue once it is freed again.
    assert finish(manager, [*tokens(2), 99]) == [0, 1, 4]
    assert list(manager.free_block_ids) == [4, 5, 6, 7, 3, 2, 1, 0]

    # Of blocks without content the one freed last goes first: its memory is the warmest.
    third, fourth = start(manager, [7] * 3), start(manager, [8] * 3)
    assert (list(third.block_table), list(fourth.block_table)) == ([4], [5])
    manager.free(third)
    manager.free(fourth)
    assert list(manager.free_block_ids) == [5, 4, 6, 7, 3, 2, 1, 0]


def test_forgotten_block_goes_first(manager: BlockManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free block whose content is forgotten, since its hash leads elsewhere now, must be reused before those
    whose content can still be found."""
    monkeypatch.setattr(block_manager_module, "_hash", lambda token_bytes, parent_hash: token_bytes[0] % 2)
    even, odd = (start(manager, [first] * BLOCK_SIZE) for first in (0, 1))
    (findable,), (forgotten,) = even.block_table, odd.block_table
    for seq in (even, odd):
        compute(manager, seq)
        manager.free(seq)
    assert list(manager.free_block_ids)[-2:] == [findable, forgotten]
    compute(manager, start(manager, [3] * BLOCK_SIZE))
    assert manager.blocks[findable].content_id and not manager.blocks[forgotten].content_id
    assert_reused_before(manager, forgotten, findable)


def test_republished_orphan_goes_first(manager: BlockManager) -> None:
    """As above without a collision: the child of an evicted parent is forgotten when both are published anew."""
    prefix = [*tokens(2), 99]
    first, second = start_twins(manager, prefix)
    other = compute(manager, start(manager, tokens(1, first=50), seq_id=2))
    parent, orphan, findable = first.block_table[0], second.block_table[1], other.block_table[0]
    for seq in (first, other, second):
        manager.free(seq)
    evict(manager, parent)
    assert manager.blocks[orphan].content_id and manager.blocks[findable].content_id
    compute(manager, start(manager, prefix, seq_id=3))
    assert not manager.blocks[orphan].content_id and manager.blocks[findable].content_id
    assert_reused_before(manager, orphan, findable)


def assert_reused_before(manager: BlockManager, block_id: int, other_id: int) -> None:
    order = list(manager.free_block_ids)
    assert order.index(block_id) < order.index(other_id), f"block {block_id} must go before {other_id} in {order}"


def start_twins(manager: BlockManager, prompt: list[int]) -> tuple[Sequence, Sequence]:
    """Two sequences of one prompt: the first publishes its first block, the second all after that. Its own copy of
    the first block stays private."""
    first, second = (start(manager, prompt, seq_id=seq_id) for seq_id in (0, 1))
    first.num_computed_tokens = BLOCK_SIZE
    manager.publish(first)
    compute(manager, second)
    return first, second


def evict(manager: BlockManager, block_id: int) -> None:
    """Reuses free blocks until `block_id` has been, and gives all of them back without content."""
    taken: list[Sequence] = []
    while block_id in manager.free_block_ids:
        taken.append(start(manager, [1000 + len(taken)]))
    for seq in taken:
        manager.free(seq)


def test_hit_shares_blocks(manager: BlockManager) -> None:
    first = compute(manager, start(manager, [*tokens(2), 99]))
    second = start(manager, [*tokens(2), 77], seq_id=1)
    assert list(second.block_table[:2]) == list(first.block_table[:2])
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == 2 * BLOCK_SIZE
    assert [manager.blocks[i].ref_count for i in second.block_table] == [2, 2, 1]
    assert manager.num_shared_blocks(first) == manager.num_shared_blocks(second) == 2
    manager.free(first)
    assert [manager.blocks[i].ref_count for i in second.block_table] == [1, 1, 1]
    assert manager.num_shared_blocks(second) == 0
    manager.check_integrity([second])


@pytest.mark.parametrize("num_extra, num_hits", [(-1, 1), (0, 1), (1, 2)])
def test_one_token_is_left_to_compute(manager: BlockManager, num_extra: int, num_hits: int) -> None:
    """A prompt that is cached to its last token has no query token left, and no logits to sample from."""
    finish(manager, tokens(3))
    seq = start(manager, tokens(3)[: 2 * BLOCK_SIZE + num_extra])
    assert seq.num_published_blocks == num_hits
    assert 0 < seq.num_tokens - seq.num_computed_tokens <= BLOCK_SIZE


def test_block_of_unknown_tokens_is_not_published(manager: BlockManager) -> None:
    """A full block whose last token the host has not read has no content to compare with yet."""
    seq = compute(manager, start(manager, tokens(1)[:-1]))
    seq.num_in_flight = 1
    manager.append(seq)
    seq.num_computed_tokens += 1
    manager.publish(seq)
    assert not manager.hash_to_block_id
    seq.num_in_flight = 0
    seq.token_ids.append(BLOCK_SIZE - 1)
    manager.publish(seq)
    assert list(manager.hash_to_block_id.values()) == [0]
    assert manager.find_cached_blocks(make_sequence(1, [*tokens(1), 9])) == [0]


def test_uncomputed_block_is_not_published(manager: BlockManager) -> None:
    """A hit on a block that no launched step computes would read garbage."""
    seq = start(manager, tokens(3))
    seq.num_computed_tokens = 2 * BLOCK_SIZE - 1
    manager.publish(seq)
    assert manager.find_cached_blocks(make_sequence(1, tokens(3))) == [0]


def test_equal_hash_of_other_tokens_is_no_hit(manager: BlockManager, same_hashes: None) -> None:
    finish(manager, tokens(1))
    assert manager.find_cached_blocks(make_sequence(1, tokens(2, first=50))) == []
    assert manager.find_cached_blocks(make_sequence(1, tokens(2))) == [0]


def test_equal_tokens_after_another_parent_are_no_hit(manager: BlockManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV depends on everything before it. The hash is cut to that of the block's own tokens here."""
    monkeypatch.setattr(block_manager_module, "_hash", lambda token_bytes, parent_hash: REAL_HASH(token_bytes, 0))
    first, second, tail = tokens(1), tokens(1, first=20), tokens(1, first=40)
    one = finish(manager, first + tail)
    two = finish(manager, second)
    assert manager.find_cached_blocks(make_sequence(2, [*first, *tail, 9])) == one
    assert manager.find_cached_blocks(make_sequence(3, [*second, *tail, 9])) == two
    assert manager.find_cached_blocks(make_sequence(4, [*tail, 9])) == []


@pytest.mark.parametrize("has_equal_hashes", [False, True])
def test_salts_do_not_share(manager: BlockManager, monkeypatch: pytest.MonkeyPatch, has_equal_hashes: bool) -> None:
    """Under another salt equal tokens are other content, and that must not hang on the hash alone."""
    if has_equal_hashes:
        monkeypatch.setattr(block_manager_module, "_hash", lambda token_bytes, parent_hash: len(token_bytes))
    finish(manager, tokens(1), cache_salt=3)
    for salt, expected in ((0, []), (2, []), (4, []), (3, [0])):
        assert manager.find_cached_blocks(make_sequence(1, tokens(2), cache_salt=salt)) == expected


def test_duplicate_content_stays_private(manager: BlockManager) -> None:
    """Two blocks with one content: publishing both would leave one in the cache that no hash leads to. The chain
    goes on behind the published one, so that what only the second computed can be found as well."""
    first, second = start(manager, tokens(2)), start(manager, tokens(3), seq_id=1)
    compute(manager, first)
    compute(manager, second)
    assert sorted(manager.hash_to_block_id.values()) == [0, 1, 4]
    assert manager.find_cached_blocks(make_sequence(2, tokens(4))) == [0, 1, 4]
    manager.free(second)
    assert list(manager.free_block_ids) == [2, 3, 5, 6, 7, 4], "private copies are reused first"
    manager.check_integrity([first])


def test_orphans_are_never_matched(manager: BlockManager) -> None:
    """The child of an evicted parent stays in the map. When the parent's tokens are published anew, by way of
    another block, that child must not come back: it continues a content that is gone."""
    prefix = [*tokens(2), 99]
    first, second = start_twins(manager, prefix)
    parent, orphan = first.block_table[0], second.block_table[1]
    manager.free(first)
    manager.free(second)
    evict(manager, parent)
    assert orphan in manager.hash_to_block_id.values()
    assert manager.find_cached_blocks(make_sequence(2, prefix)) == []
    again = start(manager, tokens(1), seq_id=3)
    compute(manager, again)
    assert manager.find_cached_blocks(make_sequence(4, prefix)) == list(again.block_table)


def test_reused_block_is_forgotten() -> None:
    """A hash that still leads to a block after its reuse hands out somebody else's KV."""
    manager = BlockManager(2, BLOCK_SIZE)
    finish(manager, tokens(2))
    seq = compute(manager, start(manager, tokens(2, first=50)))
    assert manager.find_cached_blocks(make_sequence(1, tokens(2))) == []
    manager.check_integrity([seq])


def test_preempted_sequence_finds_its_own_blocks(manager: BlockManager) -> None:
    seq = compute(manager, start(manager, tokens(2)[:-1]))
    for token_id in range(70, 70 + BLOCK_SIZE):
        decode(manager, seq, token_id)
    table = list(seq.block_table)
    manager.free(seq)
    assert manager.find_cached_blocks(seq) == table[:2]


def test_reset(manager: BlockManager) -> None:
    """After a failed launch no published content may be trusted, held or free, and nobody holds a block."""
    compute(manager, start(manager, tokens(2)))
    finish(manager, tokens(2, first=50), seq_id=1)
    manager.reset()
    assert manager.find_cached_blocks(make_sequence(2, tokens(3))) == []
    assert manager.find_cached_blocks(make_sequence(2, tokens(3, first=50))) == []
    manager.check_integrity([])
    assert manager.num_free_blocks == manager.num_blocks


def test_switched_off_cache_shares_nothing() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    finish(manager, tokens(2))
    assert not manager.hash_to_block_id
    assert manager.find_cached_blocks(make_sequence(1, tokens(3))) == []


def test_idle_cached_blocks_count_as_new() -> None:
    """A cached block that nobody holds comes out of the free list too: overlooked, a full pool runs dry inside
    `allocate`."""
    manager = BlockManager(3, BLOCK_SIZE)
    finish(manager, tokens(2))
    holder = start(manager, [99])
    seq = make_sequence(1, [*tokens(2), 7])
    cached = manager.find_cached_blocks(seq)
    assert len(cached) == 2
    assert manager.num_new_blocks(seq, cached) == 3 > manager.num_free_blocks == 2
    manager.free(holder)
    manager.allocate(seq, cached)
    assert manager.num_free_blocks == 0
    # Held blocks cost nothing.
    assert manager.num_new_blocks(make_sequence(2, [*tokens(2), 8]), cached) == 1


def test_append_takes_a_block_only_at_its_boundary() -> None:
    manager = BlockManager(2, BLOCK_SIZE)
    seq = compute(manager, start(manager, [1]))
    for num_tokens in range(2, 2 * BLOCK_SIZE + 1):
        assert manager.can_append(seq)
        decode(manager, seq, num_tokens)
        assert len(seq.block_table) == -(-num_tokens // BLOCK_SIZE)
    seq.token_ids.append(0)
    assert not manager.can_append(seq)


# --- check_integrity --------------------------------------------------------------------------------------------


def raise_ref_count(manager: BlockManager, held: Sequence) -> None:
    manager.blocks[held.block_table[0]].ref_count += 1


def lower_ref_count(manager: BlockManager, held: Sequence) -> None:
    manager.blocks[held.block_table[0]].ref_count -= 1


def free_held_block(manager: BlockManager, held: Sequence) -> None:
    manager.free_block_ids[held.block_table[0]] = None


def lose_free_block(manager: BlockManager, held: Sequence) -> None:
    del manager.free_block_ids[7]


def free_unknown_block(manager: BlockManager, held: Sequence) -> None:
    manager.free_block_ids[manager.num_blocks] = None


def forget_table_entry(manager: BlockManager, held: Sequence) -> None:
    held.block_table.pop()


def hold_unknown_block(manager: BlockManager, held: Sequence) -> None:
    held.block_table.append(manager.num_blocks)


def hold_block_twice(manager: BlockManager, held: Sequence) -> None:
    held.block_table.append(held.block_table[0])


def share_private_block(manager: BlockManager, held: Sequence) -> None:
    held.block_table[2] = held.block_table[1]


def lose_hash(manager: BlockManager, held: Sequence) -> None:
    del manager.hash_to_block_id[manager.blocks[held.block_table[0]].hash]


def redirect_hash(manager: BlockManager, held: Sequence) -> None:
    manager.hash_to_block_id[manager.blocks[held.block_table[0]].hash] = held.block_table[2]


def keep_hash_of_cleared_block(manager: BlockManager, held: Sequence) -> None:
    manager.blocks[held.block_table[0]].content_id = 0


def add_stale_hash(manager: BlockManager, held: Sequence) -> None:
    manager.hash_to_block_id[12345] = 7


def add_second_hash(manager: BlockManager, held: Sequence) -> None:
    manager.hash_to_block_id[12345] = held.block_table[0]


def change_content(manager: BlockManager, held: Sequence) -> None:
    manager.blocks[held.block_table[1]].token_bytes = array("i", tokens(1, first=60)).tobytes()


def change_sequence(manager: BlockManager, held: Sequence) -> None:
    held.token_ids[0] = 999


def swap_table(manager: BlockManager, held: Sequence) -> None:
    held.block_table[0], held.block_table[1] = held.block_table[1], held.block_table[0]


CORRUPTIONS: list[Callable[[BlockManager, Sequence], None]] = [
    raise_ref_count,
    lower_ref_count,
    free_held_block,
    lose_free_block,
    free_unknown_block,
    forget_table_entry,
    hold_unknown_block,
    hold_block_twice,
    share_private_block,
    lose_hash,
    redirect_hash,
    keep_hash_of_cleared_block,
    add_stale_hash,
    add_second_hash,
    change_content,
    change_sequence,
    swap_table,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_integrity_check_sees(manager: BlockManager, corrupt: Callable[[BlockManager, Sequence], None]) -> None:
    """A check that lets a broken invariant pass guards nothing."""
    held = compute(manager, start(manager, [*tokens(2), 99]))
    manager.check_integrity([held])
    corrupt(manager, held)
    with pytest.raises(RuntimeError):
        manager.check_integrity([held])


def test_integrity_check_sees_unlisted_holder(manager: BlockManager) -> None:
    """A sequence that left the queues with its blocks is a leak."""
    compute(manager, start(manager, tokens(2)))
    with pytest.raises(RuntimeError, match="held by 0 tables"):
        manager.check_integrity([])


# --- cost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [False, True], ids=["private", "cached"])
def test_cost_of_a_block_is_independent_of_the_pool(is_cached: bool) -> None:
    """A search through the free list or the cache makes big pools slow: 100 times the blocks would cost up to 100
    times as much. The pool is full of cached blocks, so that every block taken has to be evicted."""
    small, large = (block_timer(num_blocks, is_cached) for num_blocks in (1_000, 100_000))
    pairs = [(next(small), next(large)) for _ in range(7)]
    assert min(slow for _, slow in pairs) < 5 * min(fast for fast, _ in pairs)


def block_timer(num_blocks: int, is_cached: bool) -> Iterator[float]:
    """Seconds to take, publish, find again and free 500 blocks of a used pool."""
    manager = BlockManager(num_blocks, 1, enable_prefix_caching=is_cached)
    rng = random.Random(0)

    def work(num_tokens: int) -> None:
        seq = compute(manager, start(manager, [rng.getrandbits(30) for _ in range(num_tokens)]))
        decode(manager, seq, 0)
        manager.find_cached_blocks(seq)
        manager.free(seq)

    work(num_blocks - 1)
    while True:
        started = time.perf_counter()
        for _ in range(5):
            work(100)
        yield time.perf_counter() - started
