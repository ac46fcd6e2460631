"""What a step costs on the host: schedule, pack and postprocess, without a model.

    python -m benchmarks.scheduler_cost

The device works on one step while the host reads the step before and prepares the next. As long as that takes the
host less time than the device, it costs nothing; what it takes beyond, every token pays. Two measurements:

- decode: a step that decodes one token of each of 256 running sequences. Target: 1.5 ms.
- queue: steps in which sequences end and others are admitted, in front of 1,000 and of 50,000 queued requests; a new
  request arrives for each that ends. Target: the long queue costs at most 1.5 times as much, a step and a request.

A stub stands for the model: it samples the same token for everybody, in no time. Tokens are read one step late, as in
the engine, and the garbage collector stays on, as there. Each figure is the median of the repeats, with the lowest and
the highest beside it; the two queues take turns, so that a noisy machine is noisy to both. The last line is JSON.
"""

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

from benchmarks.workloads import describe_environment
from nanovllm import SamplingParams
from nanovllm.engine.batch import pack
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence

T = TypeVar("T")
BLOCK_SIZE = 256
BLOCKS_PER_SEQUENCE = 8  # more than any sequence here gets to need: nobody is preempted
TARGET_MS, TARGET_RATIO = 1.5, 1.5


class StubEngine:
    """The engine's loop around a scheduler, with a stub for the model and a clock for each part."""

    def __init__(self, max_num_seqs: int, output_lens: tuple[int, int]) -> None:
        manager = BlockManager(max_num_seqs * BLOCKS_PER_SEQUENCE, BLOCK_SIZE)
        self.scheduler = Scheduler(
            manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=16384, schedule_policy="prefix"
        )
        self.output_lens = output_lens
        self.num_finished = 0
        self.seconds: dict[str, list[float]] = {"schedule": [], "pack": [], "postprocess": [], "add": []}
        self._random = random.Random(0)
        self._num_made = 0
        self._in_flight: ScheduledBatch | None = None

    def add(self, num_requests: int) -> None:
        sequences = [self._make_sequence() for _ in range(num_requests)]

        def add_all() -> None:
            for seq in sequences:
                self.scheduler.add(seq)

        self._clock("add", add_all)

    def step(self, *, refill: bool = False) -> None:
        """One step; with `refill`, a new request arrives for each that ends."""
        batch = self._clock("schedule", self.scheduler.schedule)
        assert batch.sequences and not batch.num_preemptions
        self._clock("pack", lambda: pack(batch, BLOCK_SIZE))
        previous, self._in_flight = self._in_flight, batch
        if previous is None:
            return
        token_ids = [0] * sum(previous.is_sampled)
        finished = self._clock("postprocess", lambda: self.scheduler.postprocess(previous, token_ids))
        self.num_finished += len(finished)
        if refill:
            self.add(len(finished))

    def reset_clock(self) -> None:
        self.num_finished = 0
        for seconds in self.seconds.values():
            seconds.clear()

    def _make_sequence(self) -> Sequence:
        prompt = array("i", [self._num_made, *range(self._random.randint(99, 1023))])  # no two begin alike
        num_output = self._random.randint(*self.output_lens)
        self._num_made += 1
        return Sequence(
            self._num_made,
            prompt,
            SamplingParams(max_tokens=num_output, ignore_eos=True),
            seed=self._num_made,
            max_total_tokens=len(prompt) + num_output,
        )

    def _clock(self, part: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        self.seconds[part].append(time.perf_counter() - started)
        return result


def measure_decode(num_seqs: int, num_steps: int, num_repeats: int) -> dict[str, list[float]]:
    """Median milliseconds of a pure decode step and of its parts, one value a repeat."""
    engine = StubEngine(num_seqs, output_lens=(900, 1000))
    engine.add(num_seqs)
    while engine.scheduler.waiting or not all(seq.is_decoding for seq in engine.scheduler.running.values()):
        engine.step()
    repeats: dict[str, list[float]] = {"schedule": [], "pack": [], "postprocess": [], "step": []}
    for _ in range(num_repeats):
        engine.reset_clock()
        for _ in range(num_steps):
            engine.step()
        parts = [engine.seconds[part] for part in ("schedule", "pack", "postprocess")]
        for part, seconds in zip(repeats, [*parts, [sum(step) for step in zip(*parts, strict=True)]], strict=True):
            repeats[part].append(1000 * statistics.median(seconds))
    assert len(engine.scheduler.running) == num_seqs, "too many steps: sequences have ended"
    return repeats


def measure_queues(
    num_seqs: int, num_queued: list[int], num_steps: int, num_repeats: int
) -> dict[int, dict[str, list[float]]]:
    """Per length of the queue: milliseconds a step and a finished request (all steps and its `add`, on average)."""
    engines = {}
    for length in num_queued:
        engines[length] = StubEngine(num_seqs, output_lens=(16, 128))
        engines[length].add(num_seqs + length)
        for _ in range(150):  # until sequences end and start at an even rate
            engines[length].step(refill=True)
    repeats: dict[int, dict[str, list[float]]] = {length: {"step": [], "request": []} for length in num_queued}
    gc.collect()
    for _ in range(num_repeats):
        for length, engine in engines.items():
            engine.reset_clock()
            for _ in range(num_steps):
                engine.step(refill=True)
            seconds = sum(sum(part) for part in engine.seconds.values())
            repeats[length]["step"].append(1000 * seconds / num_steps)
            repeats[length]["request"].append(1000 * seconds / engine.num_finished)
            assert len(engine.scheduler.waiting) >= 0.9 * length
    return repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256, help="running sequences")
    parser.add_argument("--num-queued", type=int, nargs=2, default=[1_000, 50_000], help="a short and a long queue")
    parser.add_argument("--num-steps", type=int, default=100, help="steps of a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if min(args.num_seqs, *args.num_queued, args.num_steps, args.repeats) < 1:
        parser.error("all numbers must be at least 1")
    if args.num_steps * args.repeats > 850:
        parser.error(f"num-steps * repeats must be at most 850, got {args.num_steps * args.repeats}")

    result: dict[str, float] = {"num_seqs": args.num_seqs}
    print(f"{'milliseconds':44} {'median':>8} {'low':>8} {'high':>8}")
    decode = measure_decode(args.num_seqs, args.num_steps, args.repeats)
    for part, values in decode.items():
        result[f"decode_{part}_ms"] = report(f"decode, {args.num_seqs} running: {part}", values)
    short, long = args.num_queued
    queues = measure_queues(args.num_seqs, [short, long], args.num_steps, args.repeats)
    for kind in ("step", "request"):
        for length in (short, long):
            result[f"queue_{length}_{kind}_ms"] = report(f"{length:,} queued: a {kind}", queues[length][kind])
        # Pairs ran one after the other; the median of their ratios is free of slow drifts of the machine.
        ratios = [b / a for a, b in zip(queues[short][kind], queues[long][kind], strict=True)]
        result[f"queue_{kind}_ratio"] = report(f"{long:,} over {short:,} queued: a {kind} (ratio)", ratios)
    is_fast = result["decode_step_ms"] <= TARGET_MS
    result["targets_met"] = is_fast and max(result["queue_step_ratio"], result["queue_request_ratio"]) <= TARGET_RATIO
    print(json.dumps({**result, **describe_environment()}))


def report(name: str, values: list[float]) -> float:
    """Prints a row of the table; returns the median."""
    median = statistics.median(values)
    print(f"{name:44} {median:8.3f} {min(values):8.3f} {max(values):8.3f}")
    return round(median, 4)


if __name__ == "__main__":
    main()
