"""What a model is, and what this machine can do with it. Reads no weights."""

from collections.abc import Iterator
from pathlib import Path

import torch

from nanovllm.attention import PREFILL_BACKENDS
from nanovllm.config import Config
from nanovllm.engine.memory import GIB, cpu_kv_cache_bytes, physical_memory
from nanovllm.engine.placement import resolve_device, resolve_dtype
from nanovllm.jobs.errors import JobError
from nanovllm.models import DecoderForCausalLM, DecoderSpec, build_model, resolve_architecture
from nanovllm.utils.checkpoint import open_checkpoint


def print_info(config: Config) -> int:
    """Prints what is known of the config's model; returns the exit status.

    Raises:
        JobError: there is no such model or device, or it is not supported.
    """
    try:
        for name, value in _describe(config):
            print(f"{name:>22}: {value}")
    except (OSError, TypeError, ValueError) as error:
        raise JobError(str(error)) from error
    return 0


def _describe(config: Config) -> Iterator[tuple[str, str]]:
    checkpoint = open_checkpoint(config.model, with_weights=False)
    model_class, spec = resolve_architecture(checkpoint.config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, checkpoint, device)
    max_model_len = min(config.max_model_len, spec.max_model_len)
    num_parameters = _num_parameters(model_class, spec)
    weight_bytes = num_parameters * dtype.itemsize
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    yield "architecture", model_class.__name__
    yield "layers", f"{spec.num_layers}, hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}"
    yield "heads", f"{spec.num_heads} of size {spec.head_dim}, {spec.num_kv_heads} for keys and values"
    yield "longest sequence", f"{spec.max_model_len} tokens"
    yield "parameters", f"{num_parameters:,}"
    yield "files", f"{_file_bytes(Path(checkpoint.location)):,} bytes"
    yield "device", f"{device}, {str(dtype).removeprefix('torch.')}"
    yield "weights", f"{weight_bytes:,} bytes there"
    yield "KV cache", f"{token_bytes:,} bytes a token"
    yield from _describe_memory(config, device, weight_bytes, token_bytes, max_model_len)
    attention_spec = spec.attention_spec(dtype, device, config.kvcache_block_size)
    for backend in PREFILL_BACKENDS:
        yield f"attention {backend.name}", _availability(backend.unsupported(attention_spec))


def _describe_memory(
    config: Config, device: torch.device, weight_bytes: int, token_bytes: int, max_model_len: int
) -> Iterator[tuple[str, str]]:
    """What fits. On a GPU activations and CUDA graphs take more, which only a start of the engine measures."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = min(int(total * config.gpu_memory_utilization), free)
        kv_bytes, note = share - weight_bytes, "less what activations take"
    else:
        free, total = _free_main_memory(), physical_memory()
        kv_bytes, note = free - weight_bytes, "all of the free memory"
    yield "memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if kv_bytes < token_bytes:
        yield "fits", "no: weights leave nothing for the KV cache"
        return
    num_tokens = kv_bytes // token_bytes
    yield "fits", f"{num_tokens:,} tokens of KV, {num_tokens // max_model_len:,} sequences of {max_model_len} ({note})"
    if device.type == "cpu":
        max_useful = config.max_num_seqs * max_model_len * token_bytes
        default = cpu_kv_cache_bytes(max_useful) // token_bytes
        yield "taken by default", f"{default:,} tokens of KV (num_kvcache_blocks changes it)"


def _num_parameters(model_class: type[DecoderForCausalLM], spec: DecoderSpec) -> int:
    """A tied embedding counts once."""
    model = build_model(model_class, spec, 1, torch.float32, torch.device("meta"))
    return sum(parameter.numel() for parameter in model.parameters())


def _availability(reasons: list[str]) -> str:
    return f"no: {', '.join(reasons)}" if reasons else "yes"


def _file_bytes(location: Path) -> int:
    """Bytes of the weight files."""
    paths = [location] if location.is_file() else location.glob("*.safetensors")
    return sum(path.stat().st_size for path in paths)


def _free_main_memory() -> int:
    """Bytes that new allocations can have, without swapping; of a container no more than its limit."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(1024 * int(line.split()[1]), physical_memory())
    return physical_memory()
