"""Packs what some requests of a step ask for beside temperature and filters. Pure functions, numpy only.

Most steps have none of it, and then none of this runs. What the device needs to know of a request's tokens is in a row
of a table there, by slot: it is filled when a request samples its first token since it got the slot, with all tokens
that the host has, and the device itself appends each token that it samples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.token_rules import TokenRules
from nanovllm.sampling_params import LogitsProcessor

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedExtras:
    """The extras of a step that samples N tokens and computes T. Every array is int32 or float32.

    H of the N rows depend on the tokens before: they have a penalty, a bad word of several tokens, or a processor.

    Attributes:
        fill_slots, fill_columns, fill_ids: [F] each, entries of the table of histories [slot, position] to set.
        mask_slots, masks: [G] and [G, ceil(V / 32)], rows of the table of allowed tokens to set.
        constrained_rows: [K], rows of N whose mask is only known when the step before has been read.
        allowed_rows: [A], rows of N that may sample only what the table of allowed tokens has for their slot.
        bias_rows, bias_ids, bias_values: [B] each, (row of N, token) and what is added to its logit. No pair twice.
        history_rows: [H], which of the N rows they are.
        prompt_lens, history_lens: [H], tokens of the prompt, and of the history: prompt and output so far.
        repetition, frequency, presence: [H], the penalties; 1, 0 and 0 where off.
        word_rows: [W], which of the H rows must not complete a bad word.
        word_prefixes, word_ids: [W, P] and [W], `word_ids[i]` is banned after the output tokens `word_prefixes[i]`,
            which are padded with -1 on the left.
        processor_rows: [C], which of the H rows have a processor, grouped by processor.
        scored_rows: [L], rows of N whose log-probabilities are wanted.
        prompt_rows, prompt_targets: [Q], rows of T, and the prompt tokens after them whose log-probabilities are
            wanted.
        processors: each with its number of `processor_rows`, in their order.
        max_history_len: longest history.
        has_penalty: whether some row has one.
        num_best, num_prompt_best: most best tokens that a row of `scored_rows`, or of `prompt_rows`, wants.
    """

    fill_slots: IntArray
    fill_columns: IntArray
    fill_ids: IntArray
    mask_slots: IntArray
    masks: IntArray
    constrained_rows: IntArray
    allowed_rows: IntArray
    bias_rows: IntArray
    bias_ids: IntArray
    bias_values: FloatArray
    history_rows: IntArray
    prompt_lens: IntArray
    history_lens: IntArray
    repetition: FloatArray
    frequency: FloatArray
    presence: FloatArray
    word_rows: IntArray
    word_prefixes: IntArray
    word_ids: IntArray
    processor_rows: IntArray
    scored_rows: IntArray
    prompt_rows: IntArray
    prompt_targets: IntArray
    processors: tuple[tuple[LogitsProcessor, int], ...]
    max_history_len: int
    has_penalty: bool
    num_best: int
    num_prompt_best: int

    @property
    def changes_logits(self) -> bool:
        rows = (self.constrained_rows, self.allowed_rows, self.bias_rows, self.history_rows)
        return any(map(len, rows))


def pack_extras(batch: ScheduledBatch, sampled: list[Sequence], query_starts: IntArray) -> PackedExtras | None:
    """The extras of a batch right after it was scheduled; None if nobody asks for any.

    Args:
        sampled: its N sampled sequences.
        query_starts: [S + 1], prefix sums of its query lengths.
    """
    ruled = [(row, seq, seq.rules) for row, seq in enumerate(sampled) if seq.rules is not None]
    scored = [(row, seq.params.logprobs) for row, seq in enumerate(sampled) if seq.params.logprobs is not None]
    if not (ruled or scored or batch.scored):
        return None
    return PackedExtras(
        **_pack_static(ruled),
        **_pack_histories([(row, seq, rules) for row, seq, rules in ruled if rules.needs_history]),
        **_pack_prompts(batch, query_starts),
        scored_rows=_ints([row for row, _ in scored]),
        num_best=max((num_best for _, num_best in scored), default=0),
    )


def _pack_static(ruled: list[tuple[int, Sequence, TokenRules]]) -> dict[str, Any]:
    """What doesn't depend on the tokens so far."""
    allowed = [(row, seq, rules.allowed_mask) for row, seq, rules in ruled if rules.allowed_mask is not None]
    new = [(seq.slot, mask) for _, seq, mask in allowed if _is_new_to_device(seq)]
    return {
        "constrained_rows": _ints([row for row, _, rules in ruled if rules.is_constrained]),
        "allowed_rows": _ints([row for row, _, _ in allowed]),
        "mask_slots": _ints([slot for slot, _ in new]),
        "masks": np.stack([mask for _, mask in new]) if new else np.zeros((0, 0), dtype=np.int32),
        "bias_rows": _repeat([row for row, _, _ in ruled], [len(rules.bias_ids) for _, _, rules in ruled]),
        "bias_ids": _join([rules.bias_ids for _, _, rules in ruled], np.int32),
        "bias_values": _join([rules.bias_values for _, _, rules in ruled], np.float32),
    }


def _pack_histories(rows: list[tuple[int, Sequence, TokenRules]]) -> dict[str, Any]:
    """What depends on the tokens so far, of the H rows that have such a rule."""
    rules = [rule for _, _, rule in rows]
    history_lens = _ints([seq.num_tokens - 1 for _, seq, _ in rows])  # the token to be sampled is in flight already
    new = [seq for _, seq, _ in rows if _is_new_to_device(seq)]
    new_lens = [len(seq.token_ids) for seq in new]
    return {
        "fill_slots": _repeat([seq.slot for seq in new], new_lens),
        "fill_columns": _join([np.arange(length) for length in new_lens], np.int32),
        "fill_ids": _join([np.frombuffer(seq.token_ids, dtype=np.int32) for seq in new], np.int32),
        "history_rows": _ints([row for row, _, _ in rows]),
        "prompt_lens": _ints([seq.num_prompt_tokens for _, seq, _ in rows]),
        "history_lens": history_lens,
        "max_history_len": int(history_lens.max(initial=0)),
        "repetition": _floats([rule.repetition_penalty for rule in rules]),
        "frequency": _floats([rule.frequency_penalty for rule in rules]),
        "presence": _floats([rule.presence_penalty for rule in rules]),
        "has_penalty": any(rule.has_penalty for rule in rules),
        **_pack_words(rules),
        **_pack_processors(rules),
    }


def _pack_words(rules: list[TokenRules]) -> dict[str, Any]:
    width = max((rule.word_prefixes.shape[1] for rule in rules), default=0)
    word_rows = _repeat(list(range(len(rules))), [len(rule.word_ids) for rule in rules])
    word_prefixes = np.full((len(word_rows), width), -1, dtype=np.int32)
    first = 0
    for rule in rules:
        num_words, num_columns = rule.word_prefixes.shape
        word_prefixes[first : first + num_words, width - num_columns :] = rule.word_prefixes
        first += num_words
    word_ids = _join([rule.word_ids for rule in rules], np.int32)
    return {"word_rows": word_rows, "word_prefixes": word_prefixes, "word_ids": word_ids}


def _pack_processors(rules: list[TokenRules]) -> dict[str, Any]:
    rows_of: dict[LogitsProcessor, list[int]] = {}
    for row, rule in enumerate(rules):
        if rule.processor is not None:
            rows_of.setdefault(rule.processor, []).append(row)
    return {
        "processor_rows": _ints([row for rows in rows_of.values() for row in rows]),
        "processors": tuple((processor, len(rows)) for processor, rows in rows_of.items()),
    }


def _pack_prompts(batch: ScheduledBatch, query_starts: IntArray) -> dict[str, Any]:
    row_of = {seq.seq_id: row for row, seq in enumerate(batch.sequences)} if batch.scored else {}
    prompt_rows, prompt_targets = [], []
    num_best = 0
    for seq, targets in batch.scored:
        row = row_of[seq.seq_id]
        prompt_rows.append(np.arange(targets.start, targets.stop) - 1 - batch.starts[row] + query_starts[row])
        prompt_targets.append(np.array(seq.scored_ids(targets)))
        num_best = max(num_best, seq.params.prompt_logprobs or 0)
    return {
        "prompt_rows": _join(prompt_rows, np.int32),
        "prompt_targets": _join(prompt_targets, np.int32),
        "num_prompt_best": num_best,
    }


def _is_new_to_device(seq: Sequence) -> bool:
    """Whether no token of the sequence but the one to be sampled is in flight. Else the step before has sampled one
    in the same slot, so the device has its tokens: those that it got then or before, and those that it sampled."""
    return seq.num_in_flight == 1


def _repeat(values: list[int], counts: list[int]) -> IntArray:
    return np.repeat(_ints(values), np.array(counts, dtype=np.int64))


def _join(arrays: list[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


def _ints(values: list[Any]) -> IntArray:
    return np.array(values, dtype=np.int32)


def _floats(values: list[Any]) -> FloatArray:
    return np.array(values, dtype=np.float32)
