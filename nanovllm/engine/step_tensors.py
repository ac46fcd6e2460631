"""A packed batch on the device: one buffer, one copy. Its extras, if it has any, are another."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.extras import PackedExtras
from nanovllm.engine.prefix_groups import PrefixGroups
from nanovllm.utils.context import ForwardContext, SharedPrefixes

# Kernels compile another variant for pointers that are not aligned to 16 bytes, so each array begins at such a place.
_ALIGNMENT = 4


@dataclass(frozen=True)
class StepTensors:
    """The arrays of a `PackedBatch` as tensors; see there for shapes and meaning."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    rope_lens: torch.Tensor
    logits_indices: torch.Tensor
    sampled_slots: torch.Tensor
    temperature: torch.Tensor
    keys: torch.Tensor
    filter_rows: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    banned_rows: torch.Tensor
    banned_ids: torch.Tensor
    num_decode_seqs: int
    max_query_len: int
    max_context_len: int
    prefixes: SharedPrefixes

    def forward_context(self) -> ForwardContext:
        return ForwardContext(
            kv_slots=self.kv_slots,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            num_decode_seqs=self.num_decode_seqs,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
            prefixes=self.prefixes,
        )


@dataclass(frozen=True)
class ExtraTensors:
    """The arrays of a `PackedExtras` as tensors; see there for shapes and meaning."""

    fill_slots: torch.Tensor
    fill_columns: torch.Tensor
    fill_ids: torch.Tensor
    mask_slots: torch.Tensor
    masks: torch.Tensor
    constrained_rows: torch.Tensor
    allowed_rows: torch.Tensor
    bias_rows: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    history_rows: torch.Tensor
    prompt_lens: torch.Tensor
    history_lens: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    word_rows: torch.Tensor
    word_prefixes: torch.Tensor
    word_ids: torch.Tensor
    processor_rows: torch.Tensor
    scored_rows: torch.Tensor
    prompt_rows: torch.Tensor
    prompt_targets: torch.Tensor


_FIRST_NAMES = [f.name for f in fields(StepTensors) if f.type is torch.Tensor and f.name != "block_tables"]
_GROUP_NAMES = [field.name for field in fields(SharedPrefixes)]
_EXTRA_NAMES = [field.name for field in fields(ExtraTensors)]
_Packed = PackedBatch | PrefixGroups | PackedExtras


def flatten(batch: PackedBatch) -> npt.NDArray[np.int32]:
    """All arrays of a batch but its extras one after the other, as 32-bit patterns, each at a multiple of 16 bytes. The
    block tables come last."""
    return _flatten(_batch_arrays(batch))


def _batch_arrays(batch: PackedBatch) -> list[npt.NDArray[Any]]:
    return [*_arrays(batch, _FIRST_NAMES), *_arrays(batch.groups, _GROUP_NAMES), batch.block_tables]


def _arrays(packed: _Packed, names: list[str]) -> list[npt.NDArray[Any]]:
    return [getattr(packed, name) for name in names]


def _flatten(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[np.int32]:
    flat = np.empty(sum(_padded(array.size) for array in arrays), dtype=np.int32)
    offset = 0
    for array in arrays:
        flat[offset : offset + array.size] = array.view(np.int32).ravel()
        offset += _padded(array.size)
    return flat


def view_flat(flat: torch.Tensor, batch: PackedBatch, **changes: Any) -> StepTensors:
    """The arrays of `batch` as views of a flattened copy of it, on whatever device that is."""
    *views, block_tables = _view_flat(flat, _batch_arrays(batch))
    tensors: dict[str, Any] = dict(zip(_FIRST_NAMES, views, strict=False))
    return StepTensors(
        **{
            **tensors,
            "block_tables": block_tables,
            "prefixes": SharedPrefixes(*views[len(_FIRST_NAMES) :]),
            "num_decode_seqs": batch.num_decode_seqs,
            "max_query_len": batch.max_query_len,
            "max_context_len": batch.max_context_len,
            **changes,
        }
    )


def upload(batch: PackedBatch, device: torch.device) -> torch.Tensor:
    """The flattened batch on the device. The copy is only enqueued: pinned memory is not reused before it is done."""
    return upload_ints(flatten(batch), device)


def upload_extras(extras: PackedExtras, device: torch.device) -> ExtraTensors:
    """The extras on the device; the copy is only enqueued."""
    arrays = _arrays(extras, _EXTRA_NAMES)
    return ExtraTensors(*_view_flat(upload_ints(_flatten(arrays), device), arrays))


def _view_flat(flat: torch.Tensor, arrays: list[npt.NDArray[Any]]) -> list[torch.Tensor]:
    tensors, offset = [], 0
    for array in arrays:
        part = flat[offset : offset + array.size]
        tensors.append((part.view(torch.float32) if array.dtype == np.float32 else part).view(array.shape))
        offset += _padded(array.size)
    return tensors


def upload_ints(array: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """An array on the device; the copy is only enqueued."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def host_ints(device: torch.device, *shape: int) -> npt.NDArray[np.int32]:
    """A new array, its contents undefined, to be uploaded: in pinned memory, which the copy can start from, if the
    device is a GPU. Several megabytes are worth that: no copy on the host, no page faults in every step."""
    array: npt.NDArray[np.int32] = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda").numpy()
    return array


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
