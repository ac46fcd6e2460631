"""Memory that the ranks of an engine share: the arrays of one step, as rank 0 packed them."""

import mmap
import os
import tempfile
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.host_cache import BlockCopies
from nanovllm.engine.prefix_groups import MAX_CAPACITY, MAX_LEVELS, PrefixGroups, max_num_groups

IntArray = npt.NDArray[np.int32]

# Sampling is rank 0's: what it needs beside these stays there.
_ARRAYS = (
    "token_ids",
    "positions",
    "kv_slots",
    "query_starts",
    "context_lens",
    "block_tables",
    "slots",
    "rope_lens",
    "logits_indices",
    "sampled_slots",
)
_GROUP_ARRAYS = ("own_lens", "shared_lens", "places", "starts", "lens", "members")
_HEADER_SIZE = 11
_COPIES_HEADER_SIZE = 5


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a config allows: tokens, sequences, blocks of a sequence, and loads and saves of blocks (so
    many each)."""

    num_tokens: int
    num_seqs: int
    table_width: int
    num_copies: int = 0

    @property
    def num_bytes(self) -> int:
        per_token = 5  # token_ids, positions, kv_slots, rope_lens, rows of scored prompt tokens
        # query_starts, context_lens, slots, logits_indices, sampled_slots, block table; own_lens, shared_lens, places
        per_seq = 5 + self.table_width + 2 + MAX_LEVELS
        per_group = 2 + MAX_CAPACITY  # starts, lens, members
        num_values = self.num_tokens * per_token + self.num_seqs * per_seq + max_num_groups(self.num_seqs) * per_group
        return 4 * max(_HEADER_SIZE + 1 + num_values, _COPIES_HEADER_SIZE + 4 * self.num_copies)


class StepMemory:
    """One step's arrays, or the copies of blocks that begin before one. Rank 0 writes them; the others copy them before
    rank 0 may write again.

    The memory is a file without a name, which other processes inherit: nothing is left of it when the last process
    that has it open ends, however it ends. What no step has used takes no room.
    """

    def __init__(self, limits: StepLimits, file_descriptor: int | None = None) -> None:
        """Makes new memory, or opens that of a file descriptor. Either is open until `close_file`."""
        self.file_descriptor = nameless_file() if file_descriptor is None else file_descriptor
        if file_descriptor is None:
            os.ftruncate(self.file_descriptor, limits.num_bytes)
        self._values = np.frombuffer(mmap.mmap(self.file_descriptor, limits.num_bytes), dtype=np.int32)

    def close_file(self) -> None:
        """Closes the descriptor; the memory itself is there as long as this object."""
        os.close(self.file_descriptor)

    def write(self, batch: PackedBatch) -> None:
        extras = batch.extras
        prompt_rows = np.zeros(0, dtype=np.int32) if extras is None else extras.prompt_rows
        self._values[:_HEADER_SIZE] = (
            len(batch.token_ids),
            *batch.block_tables.shape,
            len(batch.sampled_slots),
            len(prompt_rows),
            batch.has_plain_sampling,
            batch.num_decode_seqs,
            batch.max_query_len,
            batch.max_context_len,
            *batch.groups.members.shape,
        )
        offset = _HEADER_SIZE
        arrays = [getattr(batch, name) for name in _ARRAYS] + [getattr(batch.groups, name) for name in _GROUP_ARRAYS]
        for array in (*arrays, prompt_rows):
            self._values[offset : offset + array.size] = array.ravel()
            offset += array.size

    def read(self) -> tuple[PackedBatch, IntArray | None]:
        """A copy of the step, without what says how tokens are chosen; and rows of its tokens whose logits are wanted
        beside those of the sampled tokens, or None if its sampling is plain."""
        header = [int(value) for value in self._values[:_HEADER_SIZE]]
        num_tokens, num_seqs, width, num_sampled, num_prompt_rows, is_plain, num_decode_seqs = header[:7]
        num_groups, capacity = header[9:]
        shapes: list[tuple[int, ...]] = [
            *[(num_tokens,)] * 3,
            (num_seqs + 1,),
            (num_seqs,),
            (num_seqs, width),
            (num_seqs,),
            (num_tokens,),
            *[(num_sampled,)] * 2,
            *[(num_decode_seqs,)] * 2,
            (num_decode_seqs, MAX_LEVELS),
            *[(num_groups,)] * 2,
            (num_groups, capacity),
            (num_prompt_rows,),
        ]
        arrays, offset = [], _HEADER_SIZE
        for shape in shapes:
            size = int(np.prod(shape))
            arrays.append(self._values[offset : offset + size].reshape(shape).copy())
            offset += size
        batch = PackedBatch(
            **dict(zip(_ARRAYS, arrays, strict=False)),
            **_no_sampling(num_sampled),  # type: ignore[arg-type]
            num_decode_seqs=num_decode_seqs,
            max_query_len=header[7],
            max_context_len=header[8],
            groups=PrefixGroups(*arrays[len(_ARRAYS) : -1]),
        )
        return batch, None if is_plain else arrays[-1]

    def write_copies(self, copies: BlockCopies) -> None:
        """Tickets are 32 bits wide: enough for years of steps."""
        pairs = np.array([*copies.loads, *copies.saves], dtype=np.int32)
        header = (copies.ticket, copies.loads_done, copies.saves_done, len(copies.loads), len(copies.saves))
        self._values[:_COPIES_HEADER_SIZE] = header
        self._values[_COPIES_HEADER_SIZE : _COPIES_HEADER_SIZE + pairs.size] = pairs.ravel()

    def read_copies(self) -> BlockCopies:
        header = [int(value) for value in self._values[:_COPIES_HEADER_SIZE]]
        ticket, loads_done, saves_done, num_loads, num_saves = header
        values = self._values[_COPIES_HEADER_SIZE:][: 2 * (num_loads + num_saves)].tolist()
        pairs = list(zip(values[::2], values[1::2], strict=True))
        return BlockCopies(ticket, loads_done, saves_done, pairs[:num_loads], pairs[num_loads:])


def _no_sampling(num_sampled: int) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]:
    empty, zeros = np.zeros(0, dtype=np.int32), np.zeros(num_sampled, dtype=np.int32)
    floats = np.zeros(num_sampled, dtype=np.float32)
    return {
        "temperature": floats,
        "keys": np.zeros((num_sampled, 2), dtype=np.int32),
        "filter_rows": empty,
        "top_k": zeros,
        "top_p": floats,
        "min_p": floats,
        "banned_rows": empty,
        "banned_ids": empty,
    }


def nameless_file() -> int:
    """Descriptor of a file that only those who have it open know, and that is gone with the last of them."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nanovllm")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
