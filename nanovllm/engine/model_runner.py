"""What is on the device: weights, KV cache, CUDA graphs. Steps are launched in `step_runner.py`."""

import gc
import logging
import time
from dataclasses import replace

import torch

from nanovllm import kernels
from nanovllm.attention import select_backends
from nanovllm.config import Config
from nanovllm.engine.batch import PackedBatch, dummy_batch
from nanovllm.engine.block_copier import find_crossover, make_copier
from nanovllm.engine.cuda_graphs import DecodeGraphs, graph_batch_sizes
from nanovllm.engine.extra_sampler import ExtraSampler
from nanovllm.engine.memory import (
    check_kv_blocks,
    cpu_kv_cache_bytes,
    host_cache_bytes,
    kv_cache_bytes,
    physical_memory,
)
from nanovllm.engine.placement import resolve_device, resolve_dtype
from nanovllm.engine.prefix_groups import max_num_groups
from nanovllm.engine.step_runner import StepRunner
from nanovllm.engine.step_tensors import upload, view_flat
from nanovllm.layers.attention import LayerCache
from nanovllm.layers.parallel import SINGLE, Parallel
from nanovllm.layers.peers import connect_peers
from nanovllm.models import build_model, resolve_architecture
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.loader import load_dummy_weights, load_weights

logger = logging.getLogger(__name__)

# Kept free beside what the warm-up measured: fragments of the allocator, and libraries' own workspaces.
_MARGIN_BYTES = 256 << 20

# Each costs the host some memory, and the start some time. A model so small that more would fit needs no more.
_MAX_KV_BLOCKS = 1 << 20


class ModelRunner(StepRunner):
    """Owns the device: makes all that steps work on, as much of it as fits, and gives it back."""

    def __init__(
        self,
        config: Config,
        checkpoint: Checkpoint,
        max_model_len: int,
        num_sampled_ids: int,
        parallel: Parallel = SINGLE,
    ) -> None:
        """Builds and fills the model, and allocates the KV cache.

        Args:
            max_model_len: most tokens of a sequence.
            num_sampled_ids: only token ids below this are ever sampled.
            parallel: which rank this is, of those that share the model.

        Raises:
            ValueError: the checkpoint, the backend or the memory can't serve the config.
        """
        self.config = config
        self.max_model_len = max_model_len
        self.num_sampled_ids = num_sampled_ids
        self.parallel = parallel
        self._host_cache_bytes = host_cache_bytes(config.kv_offload_gb, parallel.size, config.data_parallel_size)
        self.device = resolve_device(config.device, parallel.rank)
        if self.device.type == "cuda":
            if not kernels.are_installed():
                raise ValueError("a CUDA device needs the package triton, which is not installed")
            self._free_at_start, _ = torch.cuda.mem_get_info(self.device)
        self.dtype = resolve_dtype(config.dtype, checkpoint, self.device)
        with self._current_device():
            self._load(checkpoint)
            self._prepare()

    def _load(self, checkpoint: Checkpoint) -> None:
        """The model with its weights, and its attention backends."""
        config = self.config
        model_class, spec = resolve_architecture(checkpoint.config)
        attention_spec = spec.attention_spec(self.dtype, self.device, config.kvcache_block_size, self.parallel)
        max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        sizes = (max_rows, spec.hidden_size, spec.vocab_size)
        self.parallel = connect_peers(self.parallel, self.device, self.dtype, *sizes)
        backends = select_backends(attention_spec, config.attention_backend)
        self.attention_name, self.block_size = backends.name, backends.block_size

        self.model = build_model(model_class, spec, self.max_model_len, self.dtype, self.device, self.parallel)
        if config.load_format == "dummy":
            load_dummy_weights(self.model, self.parallel.rank)
        else:
            load_weights(self.model, checkpoint)

        attention_spec = replace(attention_spec, block_size=self.block_size)
        self.prefill_backend = backends.prefill(attention_spec)
        self.decode_backend = self.prefill_backend
        if backends.decode is not backends.prefill:
            self.decode_backend = backends.decode(attention_spec)
        self.group_capacity = self.decode_backend.group_capacity

    def _prepare(self) -> None:
        """Everything else that a step works on."""
        # The last row is written by padding, and read by nobody.
        num_slots = self.config.max_num_seqs + 1
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        self.extra_sampler = ExtraSampler(num_slots, self.max_model_len, self.num_sampled_ids, self.device)
        self._sample_rest = None
        self.graphs = None
        if self.device.type == "cuda":
            self._bind_kv_cache(1)
            self._compile_ahead()
        self.num_kv_blocks = self._agree(self._num_kv_blocks())
        self._bind_kv_cache(self.num_kv_blocks)
        if self._wants_graphs:
            self.graphs = self._capture(self._graph_batch_sizes)
        self._prepare_offload()
        logger.info(
            "%s in %s on %s: KV cache of %d blocks of %d tokens",
            type(self.model).__name__,
            str(self.dtype).removeprefix("torch."),
            self.device,
            self.num_kv_blocks,
            self.block_size,
        )

    def _prepare_offload(self) -> None:
        """The second level of the prefix cache: `num_host_blocks`, of which at least `min_load_blocks` at a time are
        loaded. None, if that is never of use."""
        self.num_host_blocks = 0
        self.min_load_blocks: int | None = None
        self._copier = None
        if self.config.kv_offload_gb:
            self._copier = make_copier(self.kv_cache, self._host_cache_bytes)
            is_cpu = self.device.type == "cpu"
            self.min_load_blocks = 1 if is_cpu else find_crossover(self._copier, self._measure_prefill())
            self.num_host_blocks = self._agree(self._copier.num_slots if self.min_load_blocks else 0)
            if not self.num_host_blocks:
                self._copier.close()
                self._copier = None

    def close(self) -> None:
        """Frees the device's memory at once, whoever still refers to the runner."""
        self.graphs = self._sample_rest = None
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        for layer in self.model.attention_layers():
            layer.cache = None
        del self.model, self.kv_cache, self.last_tokens, self.extra_sampler
        if self.device.type == "cuda":
            self._release()

    @property
    def _wants_graphs(self) -> bool:
        is_possible = self.device.type == "cuda" and self.decode_backend.captures_in_graphs
        return is_possible and not self.config.enforce_eager

    @property
    def _graph_batch_sizes(self) -> list[int]:
        return graph_batch_sizes(min(self.config.max_num_seqs, self.config.max_num_batched_tokens))

    def _capture(self, batch_sizes: list[int]) -> DecodeGraphs:
        with torch.inference_mode():
            return DecodeGraphs(
                self._forward,
                self._sample_for_capture,
                batch_sizes,
                table_width=-(-self.max_model_len // self.block_size),
                max_context_len=self.max_model_len,
                dummy_slot=self.config.max_num_seqs,
                group_capacity=self.group_capacity,
                is_alone=self.parallel.size == 1,
                device=self.device,
            )

    def _bind_kv_cache(self, num_blocks: int) -> None:
        spec, layers = self.prefill_backend.spec, self.model.attention_layers()
        shape = (len(layers), 2, num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer, (k_cache, v_cache) in zip(layers, self.kv_cache, strict=True):
            layer.cache = LayerCache(k_cache, v_cache, self.prefill_backend, self.decode_backend)

    def _agree(self, number: int) -> int:
        """The smallest of the numbers that the ranks come with."""
        return number

    def _num_kv_blocks(self) -> int:
        """The configured number of blocks, or as many as fit."""
        spec, num_layers = self.prefill_backend.spec, self.model.spec.num_layers
        block_bytes = 2 * num_layers * self.block_size * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        if (wanted := self.config.num_kvcache_blocks) is not None:
            is_cpu = self.device.type == "cpu"
            total = physical_memory() if is_cpu else torch.cuda.mem_get_info(self.device)[1]
            check_kv_blocks(wanted, block_bytes, total)
            return wanted
        max_useful = self.config.max_num_seqs * -(-self.max_model_len // self.block_size) * block_bytes
        if self.device.type == "cpu":
            num_bytes = cpu_kv_cache_bytes(max_useful, self.parallel.size * self.config.data_parallel_size)
        else:
            reserve = self._measure_reserve()
            free, total = torch.cuda.mem_get_info(self.device)
            num_bytes = kv_cache_bytes(
                total=total,
                free=free,
                utilization=self.config.gpu_memory_utilization,
                own=self._free_at_start - free,
                reserve=reserve,
            )
        if num_bytes < block_bytes:
            raise ValueError(f"the KV cache gets {num_bytes} bytes, but one block takes {block_bytes}")
        return min(num_bytes // block_bytes, _MAX_KV_BLOCKS)

    def _largest_batch(self) -> PackedBatch:
        config = self.config
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        query_len = min(-(-config.max_num_batched_tokens // num_seqs), self.max_model_len)
        return self._dummy_batch(num_seqs, query_len)

    def _dummy_batch(self, num_seqs: int, query_len: int, num_groups: int = 0) -> PackedBatch:
        return dummy_batch(
            num_seqs,
            query_len,
            dummy_slot=self.config.max_num_seqs,
            num_filters=num_seqs,
            group_capacity=self.group_capacity,
            num_groups=num_groups,
        )

    @torch.inference_mode()
    def _compile_ahead(self) -> None:
        """Compiles all kernels at once, rather than each when a step first comes to it."""
        with kernels.compiling_ahead():
            batches = [self._dummy_batch(size, 1) for size in (1, 64, 128, 256)]
            if self.group_capacity > 1:
                batches.append(self._dummy_batch(256, 1, num_groups=1))
            for batch in (*batches, self._largest_batch()):
                inputs = view_flat(upload(batch, self.device), batch)
                self._sample(self._forward(inputs), inputs)

    @torch.inference_mode()
    def _measure_reserve(self) -> int:
        """Bytes that the largest step and the CUDA graphs take beside weights and KV cache. Runs them, but for what
        extras add, which is known without compiling the kernels that few requests need."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        batch = self._largest_batch()
        self._launch(batch)
        activations = torch.cuda.max_memory_allocated(self.device) - before
        shared = self.decode_backend.shared_bytes(max_num_groups(len(batch.slots)))
        activations += self.extra_sampler.peak_bytes(len(batch.slots), self.model.spec.vocab_size, self.dtype.itemsize)
        graphs = 0
        if self._wants_graphs:
            # The largest graph holds the memory that all share; the smallest shows what each costs beside that.
            sizes = self._graph_batch_sizes
            largest = self._graph_bytes(sizes[-1:])
            num_graphs = 2 * len(sizes) if shared else len(sizes)
            graphs = largest + shared + (num_graphs - 1) * max(self._graph_bytes(sizes[:1]), 0)
        self._release()
        return activations + shared + graphs + _MARGIN_BYTES

    @torch.inference_mode()
    def _measure_prefill(self) -> float:
        """Seconds that a token of a large step takes. Long contexts take longer: this is the least that loads save."""
        batch = self._largest_batch()
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            self._launch(batch)
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds) / len(batch.token_ids)

    def _graph_bytes(self, batch_sizes: list[int]) -> int:
        self._release()
        before, _ = torch.cuda.mem_get_info(self.device)
        graphs = self._capture(batch_sizes)
        torch.cuda.synchronize(self.device)
        after, _ = torch.cuda.mem_get_info(self.device)
        del graphs
        return before - after

    def _release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
