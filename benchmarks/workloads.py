"""The requests that the benchmarks run, and what they say about the machine."""

import platform
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

import nanovllm


@dataclass(frozen=True)
class Request:
    """Token ids in, and how many to generate. The first `num_shared` tokens are the same in the whole job."""

    prompt: list[int]
    max_tokens: int
    num_shared: int = 0


@dataclass(frozen=True)
class Job:
    """A benchmark's requests. `make(seed)` gives the same lengths with other token ids for each seed."""

    make: Callable[[int], list[Request]]
    max_num_seqs: int
    description: str


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


def _mixed_job(num_requests: int, max_num_seqs: int, low: int = 100, high: int = 1024) -> Job:
    def make(seed: int) -> list[Request]:
        return with_other_tokens(mixed_requests(num_requests, (low, high), (low, high), seed=0), seed=seed)

    return Job(make, max_num_seqs, f"{num_requests} requests of {low}..{high} tokens in and out")


def _prefix_job(num_requests: int, num_shared: int, num_own: int, num_output: int) -> Job:
    def make(seed: int) -> list[Request]:
        requests = [Request([0] * (num_shared + num_own), num_output, num_shared)] * num_requests
        return with_other_tokens(requests, seed=seed)

    text = f"{num_requests} prompts of {num_shared} shared and {num_own} own tokens, {num_output} out"
    return Job(make, num_requests, text)


JOBS = {
    "small64": _mixed_job(64, 64, 16, 128),
    "mixed16": _mixed_job(16, 16),
    "mixed256": _mixed_job(256, 256),
    "mixed1024": _mixed_job(1024, 1024),
    "steady2048": _mixed_job(2048, 512),
    "prefix512": _prefix_job(512, 2048, 100, 128),
}


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
