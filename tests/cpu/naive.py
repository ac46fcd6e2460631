"""What rules do to logits, one token at a time in plain Python, and what log-probabilities must be."""

from collections import Counter
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams

INF = float("inf")


def edit_naively(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    """The rules on one row, a token at a time."""
    row = logits.tolist()
    if params.allowed_token_ids is not None:
        row = [value if token in params.allowed_token_ids else -INF for token, value in enumerate(row)]
    for token, bias in dict(params.logit_bias).items():
        row[token] += bias
    for word in params.bad_words:
        *before, last = word
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            row[last] = -INF
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return torch.tensor(row)


@torch.inference_mode()
def check_logprobs(model: Any, outputs: list[Any], params: Any) -> None:
    """Every entry against transformers' logits of the whole sequence: complete, in order, right to 1e-4."""
    params = params if isinstance(params, list) else [params] * len(outputs)
    for output, one in zip(outputs, params, strict=True):
        prompt, tokens = output["prompt_token_ids"], output["token_ids"]
        logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert ("logprobs" in output) == (one.logprobs is not None)
        assert ("prompt_logprobs" in output) == (one.prompt_logprobs is not None)
        if one.logprobs is not None:
            check_entries(output["logprobs"], tokens, logits[len(prompt) - 1 : -1], one.logprobs)
        if one.prompt_logprobs is not None:
            assert output["prompt_logprobs"][0] is None
            num_scored = len(prompt) - 1
            check_entries(output["prompt_logprobs"][1:], prompt[1:], logits[:num_scored], one.prompt_logprobs)


def check_entries(entries: list[Any], tokens: list[int], logits: torch.Tensor, num_best: int) -> None:
    assert len(entries) == len(tokens) == len(logits)
    for entry, token, row in zip(entries, tokens, logits, strict=True):
        order = row.argsort(descending=True).tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token, *order[:num_best]}
        assert [one for one in entry if one != token] == [one for one in order[:num_best] if one != token]
        logprobs = row.log_softmax(-1)
        for one, value in entry.items():
            assert value.logprob == pytest.approx(logprobs[one].item(), abs=1e-4)
            assert value.rank == order.index(one) + 1
