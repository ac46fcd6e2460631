"""Requests for measurements, and what is said of the machine that they are made on."""

import platform
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm.version import __version__


@dataclass(frozen=True)
class Request:
    """Token ids in, and how many to generate. The first `num_shared` tokens are the same in the whole job."""

    prompt: list[int]
    max_tokens: int
    num_shared: int = 0


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
    """The same lengths and the same sharing with other token ids: one pass leaves nothing useful in the prefix cache
    for the next."""
    rng = random.Random(seed)

    def random_tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(num_tokens)]

    shared = random_tokens(max((request.num_shared for request in requests), default=0))
    return [
        Request(shared[: r.num_shared] + random_tokens(len(r.prompt) - r.num_shared), r.max_tokens, r.num_shared)
        for r in requests
    ]


def describe_environment() -> dict[str, str]:
    """Versions, commit and hardware, for the JSON line of a benchmark."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]  # wherever the caller is
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    is_gpu = torch.cuda.is_available()
    return {
        "commit": commit or "unknown",
        "nanovllm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if is_gpu
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
