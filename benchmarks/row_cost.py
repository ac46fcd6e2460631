"""What a row of a job, and a prompt of `generate`, cost the host beside the engine's steps: without a model.

    python -m benchmarks.row_cost

Where a step is short, the host computes between any two of them, and every microsecond a row is one of the whole job.
A stub stands for the device: requests are queued as in any job, but no step computes; each is ended with tokens of its
own. The job's parts, as `nanovllm run` does them:

- prepare: reading, parsing, checking and tokenising rows;
- add: making requests of them, and queueing those;
- output: turning ended requests into texts and records, and writing these, 32 rows a step.

`generate`'s are the same, without records: of texts, and of token ids. Each figure is the median of the repeats, in
microseconds a row of processor time, with the lowest and the highest beside it. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.shapes import SHAPES, save_tokenizer, shape_folder
from benchmarks.workloads import describe_environment
from nanovllm import SamplingParams
from nanovllm.engine import llm_engine
from nanovllm.engine.feed import PromptFeed
from nanovllm.engine.outputs import StepOutput
from nanovllm.jobs.engine import JobEngine
from nanovllm.jobs.job import Job, JobSettings
from nanovllm.jobs.prepare import Preparer
from nanovllm.jobs.progress import JobProgress
from nanovllm.jobs.run import _Loop, _young_heap
from nanovllm.jobs.watch import JobWatch
from nanovllm.llm import LLM

_WORDS = ("the", "a", "of", "time", "people", "river", "stone", "light", "under", "over", "quick", "slow", "paper")
_NUM_OUTPUT_TOKENS = 32
_ROWS_A_STEP = 32  # as many of 1,024 end in one when each has 32 tokens
Clock = dict[str, float]


def end_oldest(llm: LLM) -> StepOutput:
    """A step of the stub: ends the oldest requests, with made-up tokens."""
    for seq in list(llm.ledger.unfinished.values())[:_ROWS_A_STEP]:
        seq.token_ids.extend([5 + seq.seq_id % 1000] * _NUM_OUTPUT_TOKENS)
        seq.num_cached_tokens = 0
        llm.scheduler.waiting.remove(seq)
        seq.end("length")
        llm._retire([seq])
    return StepOutput()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="whose vocabulary it is")
    parser.add_argument("--num-rows", type=int, default=8192)
    parser.add_argument("--num-words", type=int, default=20, help="of each prompt")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    folder = shape_folder(args.shape)
    save_tokenizer(folder)
    rng = random.Random(0)
    texts = [" ".join(rng.choices(_WORDS, k=args.num_words)) for _ in range(args.num_rows)]
    config = {"load_format": "dummy", "device": "cpu", "max_num_seqs": args.max_num_seqs}
    clocks = []
    with stubs():
        for _ in range(args.repeats):
            clocks.append({**time_job(str(folder), texts, config), **time_generate(str(folder), texts, config)})
    result: dict[str, Any] = {"job": f"{args.num_rows} rows of {args.num_words} words, {_NUM_OUTPUT_TOKENS} tokens out"}
    for name in clocks[0]:
        values = [1e6 * clock[name] / args.num_rows for clock in clocks]
        result[name] = {"us": round(statistics.median(values), 1), "low": round(min(values), 1)}
        result[name]["high"] = round(max(values), 1)
        print("{:>24}: {us:6.1f} us a row ({low} .. {high})".format(name, **result[name]))
    print(json.dumps({**result, **describe_environment()}))


@contextmanager
def stubs() -> Iterator[None]:
    """An `LLM` in this context has no device, and ends its requests at once."""
    runner = SimpleNamespace(
        num_kv_blocks=1 << 15, block_size=16, group_capacity=0, is_lost=False, num_host_blocks=0, close=lambda: None
    )
    make_runner, step = llm_engine.make_runner, LLM._step
    llm_engine.make_runner = lambda *args, **kwargs: runner  # type: ignore[assignment, return-value]
    LLM._step = end_oldest  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm_engine.make_runner, LLM._step = make_runner, step  # type: ignore[method-assign]


def time_job(model: str, texts: list[str], config: dict[str, Any]) -> Clock:
    """Seconds of the parts of a job, whole."""
    with tempfile.TemporaryDirectory() as files:
        source = Path(files) / "in.jsonl"
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        flags = {"max_tokens": _NUM_OUTPUT_TOKENS, "ignore_eos": True}
        output = str(Path(files) / "out.jsonl")
        job = Job(JobSettings(str(source), output, model, flags=flags, seed=0, show_progress=False, config=config))
        results, _, seed, _ = job.open_results()
        clock: Clock = defaultdict(float)
        with (
            JobEngine(model, **config) as engine,
            _young_heap(),
            JobProgress(len(texts), 0, 0, is_shown=False) as progress,
        ):
            form = job.make_format(engine.tokenizer)
            preparer, rows = Preparer(engine.inputs, form, job.make_params(seed)), job.input.rows()
            loop = _Loop(job, engine, form, preparer, rows, results, progress, JobWatch(job))
            while loop.has_work:
                if not loop._is_read:
                    with timed(clock, "job: prepare"):
                        loop._prepare()
                with timed(clock, "job: add"):
                    while loop._ready:
                        loop._add(loop._ready.popleft())
                while engine.num_rows:
                    with timed(clock, "steps"):  # the stub's own, which `engine.step` has no more to do with then
                        step = engine._llm._step()
                    step_of, engine._llm._step = engine._llm._step, lambda step=step: step
                    with timed(clock, "job: output"):
                        loop._write(*loop._step())
                    engine._llm._step = step_of
        results.close()
        assert progress.num_completed == len(texts), f"{progress.num_completed} rows of {len(texts)} were completed"
    del clock["steps"]
    return {**clock, "job: sum": sum(clock.values())}


def time_generate(model: str, texts: list[str], config: dict[str, Any]) -> Clock:
    """Seconds of the parts of `generate`, for texts and for token ids."""
    clock: Clock = defaultdict(float)
    with LLM(model, **config) as llm:
        token_ids = [llm.tokenizer.encode(text) for text in texts]
        for name, prompts in (("texts", texts), ("token ids", token_ids)):
            parts: Clock = defaultdict(float)
            with timed(parts, f"{name}: prepare"):
                checked = llm.inputs.check_prompts(prompts)
                params = SamplingParams(max_tokens=_NUM_OUTPUT_TOKENS, ignore_eos=True, seed=0)
                feed = PromptFeed(checked, llm.inputs.process_params(params, len(checked)), llm.inputs.encode)
                while not feed.is_encoded:
                    feed.encode_chunk()
            requests, outputs = {}, {}
            while not feed.is_taken:
                with timed(parts, f"{name}: add"):
                    for _ in range(min(1024, feed.num_prompts - feed.num_taken)):
                        seq = llm.requests.make(*feed.take())
                        requests[seq.seq_id] = seq
                        llm._enqueue(seq)
                while llm.ledger.unfinished:
                    llm._step()
                    with timed(parts, f"{name}: output"):
                        llm._collect(requests, outputs, llm.texts.output_of)
            while requests:  # what there was no time for
                with timed(parts, f"{name}: output"):
                    llm._collect(requests, outputs, llm.texts.output_of)
            assert len(outputs) == len(texts)
            clock.update(parts)
            clock[f"{name}: sum"] = sum(parts.values())
    return clock


@contextmanager
def timed(clock: Clock, name: str) -> Iterator[None]:
    started = time.process_time()
    yield
    clock[name] += time.process_time() - started


if __name__ == "__main__":
    main()
