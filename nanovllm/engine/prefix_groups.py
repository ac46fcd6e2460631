"""Which decoding sequences share which leading KV blocks: read once for all of them, these cost a step once.

Equal prefixes lie in the same blocks, so the sequences' block tables form a tree: sequences that begin with the same
blocks run together to where they part. A *group* is some of the sequences below a node of the tree, as many as the
kernel takes at a time, with the tokens from the node above to this one: their queries attend to those together. What
no group of a sequence covers, it attends to alone. Numpy only, no device.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

# Groups that a sequence may be in: a system prompt, its few shots, a document, a conversation.
MAX_LEVELS = 4
# Members of a group, in whatever backend.
MAX_CAPACITY = 64
# What a group costs beside its reads, in tokens read: once for itself, and for each member, whose results are joined.
_GROUP_COST = 64
_MEMBER_COST = 16


@dataclass(frozen=True)
class PrefixGroups:
    """The groups of a batch's N decoding sequences; all int32. A group of no tokens is padding.

    Attributes:
        own_lens: [N], tokens of each context that no group covers; they are its last ones, and at least one.
        shared_lens: [N], the others, a multiple of the block size.
        places: [N, MAX_LEVELS], where a sequence is a member: group * capacity + index; -1 where of no group.
        starts: [G], position of the first token of each group, a multiple of the block size.
        lens: [G], its number of tokens, a multiple of the block size.
        members: [G, capacity], rows of the batch, -1 where there are fewer. The first is always there in a group of
            any tokens: its block table holds them.
    """

    own_lens: IntArray
    shared_lens: IntArray
    places: IntArray
    starts: IntArray
    lens: IntArray
    members: IntArray

    @classmethod
    def none(cls, context_lens: IntArray, capacity: int = 0, num_groups: int = 0) -> "PrefixGroups":
        """No groups, but `num_groups` that are padding."""
        return cls(
            own_lens=context_lens,
            shared_lens=np.zeros_like(context_lens),
            places=np.full((len(context_lens), MAX_LEVELS), -1, dtype=np.int32),
            starts=np.zeros(num_groups, dtype=np.int32),
            lens=np.zeros(num_groups, dtype=np.int32),
            members=np.full((num_groups, capacity), -1, dtype=np.int32),
        )

    def padded(self, num_seqs: int, num_groups: int) -> "PrefixGroups":
        """With sequences of empty contexts, and groups of no tokens, added up to these numbers."""

        def pad(array: IntArray, size: int, value: int = 0) -> IntArray:
            shape = (size - len(array), *array.shape[1:])
            return np.concatenate((array, np.full(shape, value, dtype=np.int32)))

        return PrefixGroups(
            own_lens=pad(self.own_lens, num_seqs),
            shared_lens=pad(self.shared_lens, num_seqs),
            places=pad(self.places, num_seqs, -1),
            starts=pad(self.starts, num_groups),
            lens=pad(self.lens, num_groups),
            members=pad(self.members, num_groups, -1),
        )


def max_num_groups(num_seqs: int) -> int:
    """Most groups of a batch: what a captured graph, and the kernel's memory, are made for."""
    return num_seqs // 2


class PrefixGrouper:
    """Finds the groups of each batch in turn. As long as the same sequences decode on, their groups stay as they are:
    the blocks that they take are their own, and who begins or ends, or comes back, makes another batch of it."""

    def __init__(self, block_size: int, capacity: int) -> None:
        """`capacity`: most members of a group, at most MAX_CAPACITY; with fewer than two, there are no groups."""
        assert capacity <= MAX_CAPACITY
        self.block_size, self.capacity = block_size, capacity
        self._seq_ids: list[int] = []
        self._groups = PrefixGroups.none(np.zeros(0, dtype=np.int32), capacity)

    def find(self, seq_ids: list[int], block_tables: IntArray, context_lens: IntArray) -> PrefixGroups:
        """The groups of a batch's N sequences with one query token each, their last.

        Args:
            seq_ids: who they are.
            block_tables: [N, W].
            context_lens: [N], at least 1.
        """
        if self._seq_ids != seq_ids:
            self._seq_ids = seq_ids
            self._groups = self._compute(block_tables, context_lens)
        return replace(self._groups, own_lens=context_lens - self._groups.shared_lens)

    def _compute(self, block_tables: IntArray, context_lens: IntArray) -> PrefixGroups:
        if self.capacity < 2 or len(context_lens) < 2:
            return PrefixGroups.none(context_lens, self.capacity)
        # The block of the query's own token is never shared.
        order, common = _sort_by_prefix(block_tables, (context_lens - 1) // self.block_size)
        return _make_groups(order, common, len(context_lens), self.block_size, self.capacity)


def _distinct_ends(block_tables: IntArray, num_blocks: IntArray, width: int) -> IntArray:
    """The first `width` columns of the tables, where past its number of blocks each row has a number of its own."""
    rows = np.arange(len(block_tables), dtype=np.int32)[:, None]
    columns = np.arange(width, dtype=np.int32)
    table = np.full((len(block_tables), width), -1, dtype=np.int32)
    table[:, : block_tables.shape[1]] = block_tables[:, :width]
    return np.where(columns < num_blocks[:, None], table, -1 - rows).astype(np.int32, copy=False)


def _sort_by_prefix(block_tables: IntArray, num_blocks: IntArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Rows that share their first block with another, in an order in which equal prefixes are neighbours; and how many
    blocks each has in common with the next."""
    firsts = _distinct_ends(block_tables, num_blocks, 1)[:, 0]
    by_first = np.argsort(firsts, kind="stable")
    is_equal = np.diff(firsts[by_first]) == 0
    has_company = np.append(is_equal, False) | np.insert(is_equal, 0, False)
    rows = by_first[has_company]
    if not len(rows):
        return rows, np.zeros(0, dtype=np.intp)
    table = _distinct_ends(block_tables[rows], num_blocks[rows], int(num_blocks[rows].max()))
    # As strings of bytes: any order does in which those with the same beginning are neighbours.
    order = np.argsort(table.view(f"V{table.itemsize * table.shape[1]}").ravel(), kind="stable")
    table = table[order]
    is_different = table[1:] != table[:-1]
    common = np.where(is_different.any(axis=1), is_different.argmax(axis=1), table.shape[1])
    return rows[order], common


@dataclass
class _Node:
    """Rows first .. end - 1 of the sorted ones, which have `depth` blocks in common."""

    first: int
    end: int
    depth: int


def _make_groups(
    order: npt.NDArray[np.intp], common: npt.NDArray[np.intp], num_seqs: int, block_size: int, capacity: int
) -> PrefixGroups:
    """Groups of the nodes that are worth it, without the contexts' own lens."""
    nodes = _find_nodes(common.tolist())
    least_saved = 0
    while True:
        kept = _choose(nodes, block_size, capacity, least_saved)
        num_groups = sum(-(-(node.end - node.first) // capacity) for node, _, _ in kept)
        if num_groups <= max_num_groups(num_seqs):
            break
        least_saved = 2 * least_saved + block_size
    groups = PrefixGroups.none(np.zeros(num_seqs, dtype=np.int32), capacity, num_groups)
    index = 0
    for node, start, level in kept:
        rows = order[node.first : node.end]
        groups.shared_lens[rows] = node.depth * block_size
        groups.places[rows, level] = index * capacity + np.arange(len(rows))
        for first in range(0, len(rows), capacity):
            members = rows[first : first + capacity]
            groups.starts[index] = start * block_size
            groups.lens[index] = (node.depth - start) * block_size
            groups.members[index, : len(members)] = members
            index += 1
    return groups


def _find_nodes(common: list[int]) -> list[_Node]:
    """The inner nodes of the tree, parents before children, of rows that have common[i] blocks in common with the next.

    The intervals of a suffix array's common prefixes (Abouelhoda, Kurtz and Ohlebusch, "Replacing suffix trees with
    enhanced suffix arrays", 2004).
    """
    nodes: list[_Node] = []
    open_nodes: list[_Node] = []
    for index, depth in enumerate([*common, 0]):
        first = index
        while open_nodes and open_nodes[-1].depth > depth:
            node = open_nodes.pop()
            node.end = index + 1
            first = node.first
            nodes.append(node)
        if depth and not (open_nodes and open_nodes[-1].depth == depth):
            open_nodes.append(_Node(first, 0, depth))
    return sorted(nodes, key=lambda node: (node.first, -node.end))


def _choose(nodes: list[_Node], block_size: int, capacity: int, least_saved: int) -> list[tuple[_Node, int, int]]:
    """Nodes to make groups of, each with the block that it begins with and its level.

    A node that is not worth it leaves its blocks to those below. What a group saves is its tokens' reads for all
    members but one, less what it costs.
    """
    kept: list[tuple[_Node, int, int]] = []
    path: list[tuple[_Node, int, int]] = []  # kept nodes above
    for node in nodes:
        while path and path[-1][0].end <= node.first:
            path.pop()
        start = path[-1][0].depth if path else 0
        num_members, level = node.end - node.first, len(path)
        num_groups = -(-num_members // capacity)
        saved = (num_members - num_groups) * (node.depth - start) * block_size
        saved -= num_groups * _GROUP_COST + num_members * _MEMBER_COST
        if level < MAX_LEVELS and saved > least_saved:
            path.append((node, start, level))
            kept.append(path[-1])
    return kept
