"""What N replicas make of one job: simulated from measured step times, no GPU needed.

    python -m benchmarks.scaling --requests 100000

Efficiency is the time that N always full engines would need, over the time until the last output is there. Three jobs
are compared: one queue, engines already running; the same with their start; and shards of equal numbers of requests,
started as well. Step times are those of the 0.6B shape on an H200 (docs/performance.md).
"""

import argparse
import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field

# A decode step of b sequences takes SECONDS_A_STEP + b * SECONDS_A_SEQUENCE: 1.34, 2.13, 5.79 ms for 16, 64, 256.
SECONDS_A_STEP = 0.94e-3
SECONDS_A_SEQUENCE = 19e-6
SECONDS_A_PROMPT_TOKEN = 0.33 / (256 * 562)  # the prompts of mixed256 take 0.33 s


@dataclass
class Engine:
    """One replica: a running sequence is known by the number of the step that ends it."""

    window: int
    queue: deque[int]  # output lengths; its own, or that of all
    now: float
    prompt_len: int
    slowness: float  # 1 is the measured speed
    num_steps: int = 0
    running: list[int] = field(default_factory=list)

    def fill(self, most: int) -> None:
        while self.queue and len(self.running) < min(self.window, most):
            heapq.heappush(self.running, self.num_steps + self.queue.popleft())
            self.now += self.prompt_len * SECONDS_A_PROMPT_TOKEN * self.slowness

    def until_next_end(self) -> float:
        """The time at which the next sequence ends."""
        step = (SECONDS_A_STEP + len(self.running) * SECONDS_A_SEQUENCE) * self.slowness
        return self.now + (self.running[0] - self.num_steps) * step

    def advance(self) -> None:
        """Goes on until then, and takes new requests in the place of what has ended."""
        self.now = self.until_next_end()
        self.num_steps = self.running[0]
        while self.running and self.running[0] == self.num_steps:
            heapq.heappop(self.running)
        self.fill(self.window)


def output_lengths(num_requests: int, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Lognormal lengths, cut at `longest`; `mean` is that of the uncut distribution."""
    rng = random.Random(seed)
    scale = mean / 2.718281828459045 ** (sigma**2 / 2)
    return [min(longest, 1 + int(scale * rng.lognormvariate(0.0, sigma))) for _ in range(num_requests)]


def makespan(lengths: list[int], num_engines: int, args: argparse.Namespace, *, is_static: bool, start: float) -> float:
    """Seconds until the last output of a job."""
    shared = deque(lengths)
    queues = [deque(lengths[index::num_engines]) if is_static else shared for index in range(num_engines)]
    rng = random.Random(args.seed)
    slow = [1 + args.spread * rng.uniform(-1, 1) for _ in queues]
    engines = [Engine(args.window, queue, start, args.prompt_len, one) for queue, one in zip(queues, slow, strict=True)]
    for engine in engines:
        engine.fill(-(-len(lengths) // num_engines))
    events = [(engine.until_next_end(), index) for index, engine in enumerate(engines) if engine.running]
    heapq.heapify(events)
    while events:
        _, index = events[0]
        engines[index].advance()
        if engines[index].running:
            heapq.heapreplace(events, (engines[index].until_next_end(), index))
        else:
            heapq.heappop(events)
    return max(engine.now for engine in engines)


def full_time(lengths: list[int], num_engines: int, args: argparse.Namespace) -> float:
    """Seconds that engines need whose window is full from the first step to the last."""
    a_token = SECONDS_A_STEP / args.window + SECONDS_A_SEQUENCE
    prompts = len(lengths) * args.prompt_len * SECONDS_A_PROMPT_TOKEN
    return (sum(lengths) * a_token + prompts) / num_engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    parser.add_argument("--window", type=int, default=256, help="sequences that an engine runs at the same time")
    parser.add_argument("--prompt-len", type=int, default=500)
    parser.add_argument("--mean", type=float, default=300, help="of the output lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithms")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--start", type=float, default=7.0, help="seconds until an engine takes its first request")
    parser.add_argument("--spread", type=float, default=0.0, help="engines are up to this share faster or slower")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lengths = output_lengths(args.requests, args.mean, args.sigma, args.longest, args.seed)
    print(f"{args.requests} requests, {sum(lengths)} output tokens, the longest output {max(lengths)}")
    print("engines   full s   queue  + start   shards + start")
    rows = []
    for num_engines in args.engines:
        full = full_time(lengths, num_engines, args)
        cases = ((False, 0.0), (False, args.start), (True, args.start))
        times = [makespan(lengths, num_engines, args, is_static=static, start=start) for static, start in cases]
        queue, queue_start, shards = (full / seconds for seconds in times)
        print(f"{num_engines:7d} {full:8.1f} {queue:7.1%} {queue_start:8.1%} {shards:16.1%}", flush=True)
        rows.append({"engines": num_engines, "full_s": full, "queue_s": times[0], "shards_s": times[2]})
    print(json.dumps({"settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
