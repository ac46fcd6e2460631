"""The jobs that the benchmarks run."""

from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.utils.workloads import Request, describe_environment, mixed_requests, with_other_tokens

__all__ = ["JOBS", "Job", "Request", "describe_environment", "mixed_requests", "with_other_tokens"]


@dataclass(frozen=True)
class Job:
    """A benchmark's requests. `make(seed)` gives the same lengths with other token ids for each seed."""

    make: Callable[[int], list[Request]]
    max_num_seqs: int
    description: str


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
