"""What rules do to logits, one token at a time in plain Python."""

from collections import Counter

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
