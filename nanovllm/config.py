"""What the user may set about an engine. Frozen: anything derived from it is returned, never written back."""

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.utils.checks import check_bool, check_int, check_number

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
SCHEDULE_POLICIES = ("prefix", "fcfs")


@dataclass(frozen=True)
class Config:
    """Engine settings, checked on construction.

    Attributes:
        model: a local directory, a `.gguf` file, or a Hugging Face id.
        max_num_batched_tokens: most tokens (prefill and decode together) that one step computes.
        max_num_seqs: most sequences that run at the same time.
        max_model_len: most tokens of one sequence, prompt and output; capped by the model's own limit.
        gpu_memory_utilization: share of a GPU's memory that this engine may take, in (0, 1].
        tensor_parallel_size: number of processes that share one model, each with its own GPU if there is any. It has
            to divide the model's query heads.
        data_parallel_size: number of engines that share the requests, each with the whole model, a process, and
            `tensor_parallel_size` GPUs of its own if there are any.
        enforce_eager: never capture CUDA graphs.
        kvcache_block_size: tokens in a KV-cache block; None lets the attention backend choose.
        num_kvcache_blocks: blocks in the KV cache; None measures what fits.
        device: "auto", "cpu", "cuda" or "cuda:N"; the first of several, if the model is shared.
        dtype: of weights, activations and KV cache; "auto" is float32 on a CPU; on a GPU float16 for a
            float16 checkpoint, bfloat16 for any other.
        attention_backend: a backend's name, or "auto".
        load_format: "auto" reads the checkpoint; "dummy" makes random weights from its config alone.
        enable_prefix_caching: reuse the KV blocks of equal prompt beginnings.
        schedule_policy: which waiting request starts next. "prefix" lets those go together that begin alike or like
            something cached, and bounds how often a request is overtaken; "fcfs" is first come first served. Where
            nothing is shared they are the same.
        kv_offload_gb: GiB of host memory for KV blocks that the cache has to give up, which then come back by copy; it
            is pinned if the device is a GPU. 0 is off. The ranks of an engine share it, each replica has its own.
        seed: of the requests that bring none; None draws from the operating system.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    enable_prefix_caching: bool = True
    schedule_policy: str = "prefix"
    kv_offload_gb: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        minimums = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "max_model_len": 2}
        minimums |= {"tensor_parallel_size": 1, "data_parallel_size": 1}
        optional = {"kvcache_block_size": 1, "num_kvcache_blocks": 1, "seed": 0}
        minimums.update((name, low) for name, low in optional.items() if getattr(self, name) is not None)
        for name, low in minimums.items():  # as plain ints: numpy's would change the type of index arrays
            object.__setattr__(self, name, check_int(name, getattr(self, name), low))
        for name in ("enforce_eager", "enable_prefix_caching"):
            check_bool(name, getattr(self, name))
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True)
        check_number("kv_offload_gb", self.kv_offload_gb, 0.0)
        if self.kv_offload_gb and not self.enable_prefix_caching:
            raise ValueError(f"kv_offload_gb={self.kv_offload_gb} needs enable_prefix_caching, which is off")
        for name in ("model", "device", "dtype", "attention_backend", "load_format", "schedule_policy"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a string, got {getattr(self, name)!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("schedule_policy", self.schedule_policy, SCHEDULE_POLICIES)

    @classmethod
    def from_kwargs(cls, model: str | os.PathLike[str], **kwargs: Any) -> "Config":
        """Builds a config from an engine's keywords.

        Raises:
            TypeError: a keyword is unknown (the nearest known one is named) or has a wrong type.
            ValueError: a value is out of range.
        """
        known = [field.name for field in fields(cls) if field.name != "model"]
        for name in kwargs:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"unknown keyword {name!r}; did you mean {nearest!r}?")
        return cls(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **kwargs)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
