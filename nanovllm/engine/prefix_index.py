"""Which waiting sequences begin alike, and which of these beginnings are cached."""

from collections import OrderedDict

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


class _Node:
    """The waiting sequences that begin with the same `depth` blocks. `block_hash` is the chained hash of these."""

    __slots__ = ("block_hash", "children", "depth", "parent", "sequences")

    def __init__(self, block_hash: int, parent: "_Node | None") -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, _Node] = {}  # by their hash
        self.sequences: OrderedDict[int, Sequence] = OrderedDict()  # in order of arrival; the root's stay empty


class PrefixIndex:
    """A radix tree of waiting sequences, by the blocks that each could take from the cache.

    A sequence is in a node for each of its leading blocks, as deep as another one waits that begins alike, or as the
    cache had its blocks when it came, and one deeper: one that shares nothing costs one hash and one node.

    A node is *warm* if its prefix may be in the cache. It becomes so when a sequence comes that finds it there, or when
    one is admitted that will put it there; whether it (still) is, the cache is asked when the node is chosen. Hashes
    alone decide: a collision makes a worse order, not a wrong hit.
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self._manager = block_manager
        self._root = _Node(0, None)
        self._deepest: dict[int, _Node] = {}  # by seq_id
        self._warm: dict[int, OrderedDict[_Node, None]] = {}  # by depth; the newest last

    @property
    def is_sharing(self) -> bool:
        """Whether some sequences begin alike, or like something that was cached."""
        return bool(self._warm) or len(self._deepest) > len(self._root.children)

    def add(self, seq: Sequence) -> None:
        """Indexes a sequence that has just come."""
        num_blocks = self._num_blocks(seq)
        node = warm = self._root
        while node.depth < num_blocks and (warm is node or len(node.sequences) > 1):
            node = self._descend(seq)
            if len(node.sequences) == 2:
                first = next(iter(node.sequences.values()))
                if self._deepest[first.seq_id] is node and node.depth < self._num_blocks(first):
                    self._descend(first)  # it was alone here
            if warm is node.parent and self._manager.is_cached(node.block_hash):
                warm = node
        self._warm_up(warm)

    def remove(self, seq: Sequence) -> None:
        """Forgets a sequence, if it is there."""
        node = self._deepest.pop(seq.seq_id, self._root)
        was_warm = False
        while node.parent is not None:
            del node.sequences[seq.seq_id]
            if not node.sequences:
                del node.parent.children[node.block_hash]
                was_warm |= self._cool_down(node)
            elif was_warm:
                self._warm_up(node)
                was_warm = False
            node = node.parent

    def prefer(self, seq: Sequence) -> None:
        """Warms the longest beginning of a sequence that others wait with: its blocks are about to be computed."""
        node = self._root
        num_blocks = len(seq.token_ids) // self._manager.block_size
        while node.children and node.depth < num_blocks:
            child = node.children.get(self._manager.prefix_hash(seq, node.depth + 1))
            if child is None:
                break
            node = child
        self._warm_up(node)

    def choose(self) -> Sequence | None:
        """The oldest sequence below the longest cached prefix, of equally long ones the one warmed last; None if no
        cached prefix is waited for."""
        while self._warm:
            node = next(reversed(self._warm[max(self._warm)]))
            if self._manager.is_cached(node.block_hash):
                return next(iter(node.sequences.values()))
            self._cool_down(node)  # it has been evicted; what it begins with may still be there
            if node.parent is not None:
                self._warm_up(node.parent)
        return None

    def _num_blocks(self, seq: Sequence) -> int:
        return seq.num_reusable_tokens // self._manager.block_size

    def _descend(self, seq: Sequence) -> _Node:
        """Indexes a sequence by one block more."""
        parent = self._deepest.get(seq.seq_id, self._root)
        block_hash = self._manager.prefix_hash(seq, parent.depth + 1)
        node = parent.children.get(block_hash)
        if node is None:
            node = parent.children[block_hash] = _Node(block_hash, parent)
        node.sequences[seq.seq_id] = seq
        self._deepest[seq.seq_id] = node
        return node

    def _warm_up(self, node: _Node) -> None:
        if node is not self._root:
            nodes = self._warm.setdefault(node.depth, OrderedDict())
            nodes[node] = None
            nodes.move_to_end(node)

    def _cool_down(self, node: _Node) -> bool:
        """Returns whether the node was warm."""
        nodes = self._warm.get(node.depth)
        if nodes is None or node not in nodes:
            return False
        del nodes[node]
        if not nodes:
            del self._warm[node.depth]
        return True
