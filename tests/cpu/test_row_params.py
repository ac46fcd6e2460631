"""Rows that ask for the same params share what is made of these; nothing else may show that."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.inputs import InputProcessor
from nanovllm.jobs import prepare
from nanovllm.jobs.formats import ColumnFormat
from nanovllm.jobs.params import RowParams, row_seed
from nanovllm.jobs.prepare import BadRow, PreparedRow, Preparer
from nanovllm.jobs.readers import Row
from nanovllm.utils.checkpoint import open_checkpoint
from tests.checkpoints import smollm2_path

TEXTS = ["Hello", "<s>a</s>b", "", "<s><s>", "x" * 50]


def prepared(*own: Any) -> Iterator[PreparedRow | BadRow]:
    """Of rows with these params, under flags that say max_tokens."""
    inputs = InputProcessor(None, vocab_size=100, max_model_len=64, num_kv_tokens=64)
    preparer = Preparer(inputs, ColumnFormat(), RowParams({"max_tokens": 9}, seed=3))
    rows = [Row(index, index + 1, {"prompt": [1], "sampling_params": params}) for index, params in enumerate(own)]
    return iter(preparer.prepare(iter(rows), max_rows=len(rows)))


def params_of(*own: Any) -> list[SamplingParams]:
    rows = list(prepared(*own))
    assert all(isinstance(row, PreparedRow) for row in rows)
    return [row.params for row in rows if isinstance(row, PreparedRow)]


def test_rows_that_ask_for_the_same() -> None:
    """Guards against a row that gets the seed of the one it shares with, or somebody else's params."""
    own: list[Any] = [None, {"top_p": 0.5}, {}, {"top_p": 0.5}, {"top_p": 0.5, "seed": 7}, {"top_p": 0.5}, {"seed": 8}]
    for index, (params, said) in enumerate(zip(params_of(*own), own, strict=True)):
        assert params == SamplingParams(**{"max_tokens": 9, "seed": row_seed(3, index), **(said or {})})


def test_more_kinds_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_MAX_SHARED_PARAMS", 2)
    found = params_of(*({"top_k": index % 5} for index in range(20)))
    assert [params.top_k for params in found] == [index % 5 for index in range(20)]
    assert [params.seed for params in found] == [row_seed(3, index) for index in range(20)]


def test_equal_values_of_other_types() -> None:
    """Guards against a row that passes for another because Python's `True` equals 1: it is refused, as when it is
    alone."""
    good, bad = prepared({"max_tokens": 1}, {"max_tokens": True})
    assert isinstance(good, PreparedRow) and isinstance(bad, BadRow)
    assert str(bad.error) == "sampling_params.max_tokens: max_tokens must be an int, got True"


def test_wrong_params_stay_wrong() -> None:
    """Guards against an error that only the first of the rows gets that share it."""
    assert [str(row.error) for row in prepared({"top_p": 2}, {"top_p": 2}) if isinstance(row, BadRow)] == [
        "sampling_params.top_p: top_p must be in (0.0, 1.0], got 2"
    ] * 2


def test_with_seed() -> None:
    params = SamplingParams(temperature=0.3, stop=["a"], logit_bias={3: 1}, seed=1)
    assert params.sampling_numbers and params.constraint is None
    for seed in (None, 0, 2**64 - 1):
        assert params.with_seed(seed) == dataclasses.replace(params, seed=seed)
    assert params.seed == 1
    with pytest.raises(ValueError, match=r"seed must be in \[0, "):
        params.with_seed(-1)
    with pytest.raises(TypeError, match="seed must be an int"):
        params.with_seed(1.5)  # type: ignore[arg-type]


def test_tokens_of_a_real_vocabulary() -> None:
    """Guards against a faster way that gives other tokens: characters of several tokens, specials, white space."""
    tokenizer = open_checkpoint(str(smollm2_path())).load_tokenizer()
    assert tokenizer is not None
    inputs = InputProcessor(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=64, num_kv_tokens=64)
    assert inputs._has_plain_backend
    rng = random.Random(0)
    parts = ["the", " river", "\n\n", "  ", "\t", "漢字", "é", "e\u0301", "🙂", "\ufffd", "<|im_start|>", "12", "don't"]
    texts = ["x" + "".join(rng.choices(parts, k=rng.randrange(1, 30))) for _ in range(300)]
    assert inputs.tokenise(texts) == tokenizer(texts)["input_ids"]


class DoublingTokenizer(PreTrainedTokenizerFast):
    """Does something of its own with a text, as some kinds of tokenizers do."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus([one * 2 for one in text], *args, **kwargs)


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("setting", ["plain", "truncation", "padding", "split_special_tokens", "own kind"])
def test_tokens_are_those_of_the_tokenizer(byte_llama: Path, setting: str, add_special_tokens: bool) -> None:
    """Guards against a way past the tokenizer's own call that gives other tokens: where somebody has called it with
    truncation or padding, which its backend remembers, or where it is of a kind that does more."""
    kind: Any = DoublingTokenizer if setting == "own kind" else AutoTokenizer
    tokenizer, called = kind.from_pretrained(byte_llama), kind.from_pretrained(byte_llama)
    if setting == "truncation":
        tokenizer(["abcdef"], truncation=True, max_length=2)
    elif setting == "padding":
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer(["abcdef", "a"], padding="max_length", max_length=99)
    elif setting == "split_special_tokens":
        tokenizer.split_special_tokens = called.split_special_tokens = True
    inputs = InputProcessor(tokenizer, vocab_size=1000, max_model_len=64, num_kv_tokens=64)
    expected = called(TEXTS, add_special_tokens=add_special_tokens)["input_ids"]
    if add_special_tokens:  # a beginning that the text has itself is not doubled
        starts = [text.startswith(called.bos_token) and ids[:2] == [called.bos_token_id] * 2
                  for text, ids in zip(TEXTS, expected, strict=True)]  # fmt: skip
        expected = [ids[1:] if start else ids for start, ids in zip(starts, expected, strict=True)]
    for _ in range(2):
        assert inputs.tokenise(TEXTS, add_special_tokens) == expected
