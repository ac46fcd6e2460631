"""The requests that the benchmarks run, and what they say about the machine."""

import platform
import random
import subprocess
from dataclasses import dataclass

import torch

import nanovllm


@dataclass(frozen=True)
class Request:
    """Token ids in, and how many to generate."""

    prompt: list[int]
    max_tokens: int


def mixed_requests(
    num_requests: int, prompt_lens: tuple[int, int], output_lens: tuple[int, int], *, seed: int, vocab_size: int = 10001
) -> list[Request]:
    """Requests of uniformly random lengths (bounds included) and token ids below `vocab_size`.

    With (100, 1024) twice and seed 0 these are the lengths of nano-vLLM's own benchmark.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(*prompt_lens))] for _ in range(num_requests)]
    return [Request(prompt, rng.randint(*output_lens)) for prompt in prompts]


def with_other_tokens(requests: list[Request], *, seed: int, vocab_size: int = 10001) -> list[Request]:
    """The same lengths with other token ids: a warm-up that leaves nothing useful in the prefix cache."""
    rng = random.Random(seed)
    return [Request([rng.randrange(vocab_size) for _ in r.prompt], r.max_tokens) for r in requests]


def describe_environment() -> dict[str, str]:
    """Versions, commit and hardware, for the JSON line of a benchmark."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    is_gpu = torch.cuda.is_available()
    return {
        "commit": commit or "unknown",
        "nanovllm": nanovllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if is_gpu
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
