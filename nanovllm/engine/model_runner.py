"""Everything that happens on the device: weights, KV cache, forward pass, sampling."""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.attention import select_backend
from nanovllm.config import Config
from nanovllm.engine.batch import UNKNOWN_TOKEN, PackedBatch
from nanovllm.engine.memory import cpu_kv_cache_bytes, kv_cache_bytes
from nanovllm.layers.sampler import SamplingTensors, sample
from nanovllm.models import DecoderForCausalLM, DecoderSpec, resolve_architecture
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.context import ForwardContext, forward_context
from nanovllm.utils.loader import load_dummy_weights, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepHandle:
    """The tokens of a launched step, on their way. `tokens` [N] int64 lives on the device."""

    tokens: torch.Tensor

    def read(self) -> list[int]:
        """Waits for the step and returns its N tokens."""
        return self.tokens.tolist()


class ModelRunner:
    """Owns the device. `run` launches a step and returns at once; the tokens are read from its handle later,
    and the next step takes them from `last_tokens`, where sampling has left them, without the host."""

    def __init__(self, config: Config, checkpoint: Checkpoint, max_model_len: int, num_sampled_ids: int) -> None:
        """Builds and fills the model, and allocates the KV cache.

        Args:
            max_model_len: most tokens of a sequence.
            num_sampled_ids: only token ids below this are ever sampled.

        Raises:
            ValueError: the checkpoint, the backend or the memory can't serve the config.
        """
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, checkpoint, self.device)
        self.num_sampled_ids = num_sampled_ids
        model_class, spec = resolve_architecture(checkpoint.config)
        attention_spec = spec.attention_spec(self.dtype, self.device, config.kvcache_block_size)
        backend_class = select_backend(attention_spec, config.attention_backend)
        self.block_size = config.kvcache_block_size or backend_class.preferred_block_size

        self.model = build_model(model_class, spec, self.dtype, self.device)
        if config.load_format == "dummy":
            load_dummy_weights(self.model)
        else:
            load_weights(self.model, checkpoint)

        self.backend = backend_class(spec.attention_spec(self.dtype, self.device, self.block_size))
        self.needs_rope_lens = spec.rope.depends_on_length
        self.num_kv_blocks = config.num_kvcache_blocks or self._measure_kv_blocks(config, max_model_len)
        self._allocate_kv_cache()
        self.last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        logger.info(
            "%s in %s on %s: KV cache of %d blocks of %d tokens",
            model_class.__name__,
            str(self.dtype).removeprefix("torch."),
            self.device,
            self.num_kv_blocks,
            self.block_size,
        )

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> StepHandle:
        """Launches the forward pass and the sampling of a batch."""
        token_ids, positions = self._to_device(batch.token_ids), self._to_device(batch.positions)
        slots = self._to_device(batch.slots).long()
        decode_ids = token_ids[: batch.num_decode_seqs]
        decode_slots = slots[: batch.num_decode_seqs]
        decode_ids.copy_(
            torch.where(decode_ids == UNKNOWN_TOKEN, self.last_tokens[decode_slots].to(torch.int32), decode_ids)
        )
        context = self._forward_context(batch)
        self.backend.prepare(context)
        with forward_context(context):
            hidden = self.model(token_ids, positions, self._rope_lens(batch))
            if not len(batch.sampled_rows):
                return StepHandle(torch.empty(0, dtype=torch.int64))
            logits = self.model.compute_logits(hidden)[:, : self.num_sampled_ids]
        tokens = sample(logits, SamplingTensors.from_arrays(batch.sampling, self.device))
        self.last_tokens[slots[self._to_device(batch.sampled_rows)]] = tokens
        return StepHandle(tokens)

    def _forward_context(self, batch: PackedBatch) -> ForwardContext:
        query_lens = np.diff(batch.query_starts)
        return ForwardContext(
            kv_slots=self._to_device(batch.kv_slots).long(),
            query_starts=self._to_device(batch.query_starts),
            context_lens=self._to_device(batch.context_lens),
            block_tables=self._to_device(batch.block_tables),
            num_decode_seqs=batch.num_decode_seqs,
            max_query_len=int(query_lens[batch.num_decode_seqs :].max(initial=0)),
            logits_indices=self._to_device(batch.query_starts[1:][batch.sampled_rows] - 1).long(),
        )

    def _rope_lens(self, batch: PackedBatch) -> torch.Tensor | None:
        """Prompt tokens are rotated for the length of their prompt, later ones for the length they complete."""
        if not self.needs_rope_lens:
            return None
        prompt_lens = np.repeat(batch.prompt_lens, np.diff(batch.query_starts))
        return self._to_device(np.maximum(prompt_lens, batch.positions + 1))

    def _to_device(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _allocate_kv_cache(self) -> None:
        spec, layers = self.model.spec, self.model.attention_layers()
        shape = (len(layers), 2, self.num_kv_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer, (k_cache, v_cache) in zip(layers, self.kv_cache, strict=True):
            layer.bind(self.backend, k_cache, v_cache)

    def _measure_kv_blocks(self, config: Config, max_model_len: int) -> int:
        block_bytes = self._block_bytes()
        blocks_per_sequence = -(-max_model_len // self.block_size)
        max_useful = config.max_num_seqs * blocks_per_sequence * block_bytes
        if self.device.type == "cpu":
            num_bytes = cpu_kv_cache_bytes(max_useful)
        else:
            free, total = torch.cuda.mem_get_info(self.device)
            num_bytes = kv_cache_bytes(
                total=total,
                free=free,
                utilization=config.gpu_memory_utilization,
                own=torch.cuda.memory_allocated(self.device),
                reserve=self._activation_bytes(config),
                max_useful=max_useful,
            )
        if num_bytes < block_bytes:
            raise ValueError(f"the KV cache gets {num_bytes} bytes, but one block takes {block_bytes}")
        return num_bytes // block_bytes

    def _block_bytes(self) -> int:
        spec = self.model.spec
        elements = 2 * spec.num_layers * self.block_size * spec.num_kv_heads * spec.head_dim
        return elements * self.dtype.itemsize

    def _activation_bytes(self, config: Config) -> int:
        """Upper bound of a step's activations: the widest layer for all tokens, and logits in three copies."""
        spec = self.model.spec
        width = 4 * spec.hidden_size + 3 * spec.intermediate_size
        width += 3 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return 4 * (config.max_num_batched_tokens * width + 3 * config.max_num_seqs * spec.vocab_size)


def build_model(
    model_class: type[DecoderForCausalLM], spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> DecoderForCausalLM:
    """An uninitialised model in a dtype on a device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(spec)
    finally:
        torch.set_default_dtype(previous)
    return model.to(device).eval()


def resolve_device(name: str) -> torch.device:
    """The device of a config's `device`.

    Raises:
        ValueError: it is not a device, or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The torch dtype of a config's `dtype`; "auto" is float32 on a CPU, else the checkpoint's own."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        own = getattr(checkpoint.config, "dtype", None)  # transformers 4 says torch_dtype
        own = own or getattr(checkpoint.config, "torch_dtype", None)
        return torch.float16 if str(own).removeprefix("torch.") == "float16" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
