"""What an engine has done since it started, and what it holds: counters, gauges, and their Prometheus text.

Each counter is kept where the thing happens: `RequestCounts` by the engine (of replicas, by their parent), `StepCounts`
by the scheduler, `CacheCounts` by the block manager. `LLMEngine.stats` puts them together. None of this knows torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace


@dataclass
class RequestCounts:
    """Counters of `EngineStats`, under the same names."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_finished_stop: int = 0
    num_finished_length: int = 0
    num_finished_abort: int = 0
    num_finished_scored: int = 0

    def receive(self, num_prompt_tokens: int) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def finish(self, reason: str, number: int = 1) -> None:
        """`reason` is one of the names above."""
        name = f"num_finished_{reason}"
        setattr(self, name, getattr(self, name) + number)


@dataclass
class StepCounts:
    """Counters of `EngineStats`, under the same names."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class CacheCounts:
    """Counters of `EngineStats`, under the same names."""

    num_hit_blocks: int = 0
    num_missed_blocks: int = 0
    num_evicted_blocks: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started, and gauges of this moment. Adding two gives those of both engines together.

    Errors and `close` leave the counters as they are: they only ever rise.

    Counters:
        num_requests: requests that were queued; one with n samples is one. Pairs to be scored are requests, too.
        num_prompt_tokens: tokens of their prompts, once a request. Of a scored pair, all tokens but the last.
        num_finished_stop, num_finished_length, num_finished_abort: requests that ended, by the finish reason of their
            first sample, as in its result. Of a failed step, all requests are aborted.
        num_finished_scored: scored pairs that ended.
        num_steps: steps that computed anything.
        step_seconds: time inside of steps, waiting for the device included; several engines' seconds add up.
        num_prefill_tokens: tokens computed in prefill: prompts of all samples, and recomputation.
        num_recomputed_tokens: those of them that had been computed before their sequence was preempted.
        num_cached_tokens: prompt tokens that the prefix cache saved, of all samples, at their first admission.
        num_output_tokens: tokens that were sampled and became part of an output.
        num_hit_blocks, num_missed_blocks: full prompt blocks that sequences looked up when they were first admitted, by
            whether the prefix cache had them. What is never looked up is neither: a block with the prompt's last token,
            blocks whose logits are wanted (`prompt_logprobs`), and everything without prefix caching.
        num_evicted_blocks: blocks that were taken for something else while the prefix cache could still find them.
        num_preemptions: running sequences that gave their blocks up.
        num_failures: exceptions that ended all requests of an engine, Ctrl-C in a step included.

    Gauges:
        num_running, num_waiting: sequences (samples) that hold KV blocks, and that wait for some, preempted ones
            included.
        max_num_seqs: most sequences that can run.
        num_blocks, num_used_blocks: KV blocks, and those that sequences hold.
        num_cached_free_blocks: blocks that nobody holds, and that the prefix cache can still find.
        num_engines: how many this is the sum of.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_finished_stop: int = 0
    num_finished_length: int = 0
    num_finished_abort: int = 0
    num_finished_scored: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_hit_blocks: int = 0
    num_missed_blocks: int = 0
    num_evicted_blocks: int = 0
    num_preemptions: int = 0
    num_failures: int = 0

    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_free_blocks: int = 0
    num_engines: int = 0

    @property
    def num_finished(self) -> int:
        """Requests that ended, however they did."""
        by_reason = (self.num_finished_stop, self.num_finished_length, self.num_finished_abort)
        return sum(by_reason) + self.num_finished_scored

    @property
    def num_unfinished(self) -> int:
        return self.num_requests - self.num_finished

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, those that the prefix cache can still find included."""
        return self.num_blocks - self.num_used_blocks

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked-up prompt blocks that were found, 0 if there were none."""
        return _ratio(self.num_hit_blocks, self.num_hit_blocks + self.num_missed_blocks)

    @property
    def batch_occupancy(self) -> float:
        """Running sequences as a share of those that can run."""
        return _ratio(self.num_running, self.max_num_seqs)

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks that sequences hold."""
        return _ratio(self.num_used_blocks, self.num_blocks)

    def __add__(self, other: "EngineStats") -> "EngineStats":
        return EngineStats(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def counters(self) -> "EngineStats":
        """The same with all gauges 0: what remains of an engine that is no more."""
        return replace(self, **dict.fromkeys(_GAUGES, 0))

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The Prometheus text exposition format, with these labels on every sample."""
        return "".join(
            family(name, kind, text, {label: getattr(self, field) for label, field in samples.items()}, labels)
            for name, kind, text, samples in _FAMILIES
        )


_NAMES = tuple(field.name for field in fields(EngineStats))
_GAUGES = _NAMES[_NAMES.index("num_running") :]

# Name, kind, help, and what each sample shows: "" has no label of its own, `reason=stop` has this one.
_FAMILIES: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("requests_total", "counter", "Requests that were queued.", {"": "num_requests"}),
    (
        "requests_finished_total",
        "counter",
        "Requests that ended, by the finish reason of their first sample.",
        {f"reason={reason}": f"num_finished_{reason}" for reason in ("stop", "length", "abort", "scored")},
    ),
    ("prompt_tokens_total", "counter", "Prompt tokens of queued requests.", {"": "num_prompt_tokens"}),
    ("prefill_tokens_total", "counter", "Tokens computed in prefill.", {"": "num_prefill_tokens"}),
    ("recomputed_tokens_total", "counter", "Tokens computed again after preemptions.", {"": "num_recomputed_tokens"}),
    ("cached_tokens_total", "counter", "Prompt tokens saved by the prefix cache.", {"": "num_cached_tokens"}),
    ("output_tokens_total", "counter", "Output tokens sampled.", {"": "num_output_tokens"}),
    (
        "prefix_blocks_total",
        "counter",
        "Full prompt blocks looked up in the prefix cache, by whether they were found.",
        {"result=hit": "num_hit_blocks", "result=miss": "num_missed_blocks"},
    ),
    ("evicted_blocks_total", "counter", "Cached KV blocks taken for something else.", {"": "num_evicted_blocks"}),
    ("preemptions_total", "counter", "Running sequences that gave their blocks up.", {"": "num_preemptions"}),
    ("steps_total", "counter", "Steps computed.", {"": "num_steps"}),
    ("step_seconds_total", "counter", "Time inside of steps, of all engines.", {"": "step_seconds"}),
    ("failures_total", "counter", "Exceptions that ended all requests of an engine.", {"": "num_failures"}),
    ("running_sequences", "gauge", "Sequences that hold KV blocks.", {"": "num_running"}),
    ("waiting_sequences", "gauge", "Sequences that wait for KV blocks.", {"": "num_waiting"}),
    ("max_running_sequences", "gauge", "Most sequences that can run.", {"": "max_num_seqs"}),
    ("kv_blocks", "gauge", "KV blocks.", {"": "num_blocks"}),
    ("kv_blocks_used", "gauge", "KV blocks that sequences hold.", {"": "num_used_blocks"}),
    ("kv_blocks_cached_free", "gauge", "Free KV blocks in the prefix cache.", {"": "num_cached_free_blocks"}),
    ("engines", "gauge", "Engines that this is the sum of.", {"": "num_engines"}),
)


def family(
    name: str, kind: str, text: str, samples: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> str:
    """The lines of one metric in the Prometheus text format.

    Args:
        name: without the prefix `nanovllm_`; of a counter it ends in `_total`.
        kind: "counter" or "gauge".
        text: for the HELP line.
        samples: value by `label=its value`, or by "" where there is no label but `labels`.
    """
    lines = [f"# HELP nanovllm_{name} {_escape(text)}", f"# TYPE nanovllm_{name} {kind}"]
    for label, value in samples.items():
        own = dict([label.split("=", 1)]) if label else {}
        pairs = [f'{key}="{_escape(one, quote=True)}"' for key, one in {**(labels or {}), **own}.items()]
        lines.append(f"nanovllm_{name}{'{' + ','.join(pairs) + '}' if pairs else ''} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(text: str, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
