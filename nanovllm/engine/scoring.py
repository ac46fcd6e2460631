"""Continuations to be scored: checked and tokenised with their prompts, and what comes out."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.outputs import LogprobList, ScoreOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_unicode

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

# Of a request that only scores. One best token beside the given one tells whether that is the most likely.
SCORING_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)


@dataclass(frozen=True)
class ScoredIds:
    """The token ids of a prompt and its continuation, at least one of each."""

    token_ids: "array[int]"
    num_prompt_tokens: int


TextPair = tuple[str, str]


def check_pairs(inputs: InputProcessor, prompts: Any, continuations: Any) -> list[TextPair | ScoredIds]:
    """Pairs of a prompt and a continuation: strings, split where they are to be, or checked token ids.

    Raises:
        TypeError: something is neither a string nor a list of integers, or a pair has one of each.
        ValueError: different numbers of prompts and continuations, or a pair that is empty on one side, too long, or
            has ids outside the vocabulary. Index and limit are named.
    """
    prompts, continuations = _as_list(prompts, "prompts"), _as_list(continuations, "continuations")
    if len(prompts) != len(continuations):
        raise ValueError(f"{len(prompts)} prompts, but {len(continuations)} continuations: it must be one each")
    pairs = enumerate(zip(prompts, continuations, strict=True))
    return [_check_pair(inputs, prompt, continuation, index) for index, (prompt, continuation) in pairs]


def encode_pairs(inputs: InputProcessor, pairs: list[TextPair | ScoredIds], first_index: int = 0) -> list[ScoredIds]:
    """Token ids of checked pairs; the strings are tokenised together.

    The continuation's tokens are those of the whole text beyond the number of the prompt's own, even where the whole
    text begins with other tokens than the prompt alone: what evaluation harnesses do.

    Args:
        pairs: what `check_pairs` returned, or a part of it.
        first_index: index of the first of them in the caller's lists, for messages.

    Raises:
        ValueError: a pair is empty on one side, too long, or has ids outside the vocabulary, once it is tokenised.
    """
    texts = [text for pair in pairs if isinstance(pair, tuple) for text in (pair[0], pair[0] + pair[1])]
    encoded = iter(inputs.tokenise(texts) if texts else ())
    result = []
    for index, pair in enumerate(pairs, first_index):
        if isinstance(pair, tuple):
            prompt = inputs.check_ids(next(encoded), f"prompt {index}")
            whole = inputs.check_ids(next(encoded), f"prompt {index} and its continuation")
            if len(whole) <= len(prompt):
                raise ValueError(
                    f"continuation {index}: has no tokens of its own: together with the prompt it is tokenised into no "
                    f"more tokens ({len(whole)}) than the prompt alone ({len(prompt)}). Pass token ids"
                )
            pair = _join(inputs, prompt, whole[len(prompt) :], index)
        result.append(pair)
    return result


def score_of(seq: "Sequence") -> ScoreOutput:
    """The result of a request that has been scored."""
    scores = LogprobList.join(seq.prompt_logprobs)
    logprobs = scores.logprobs[:, 0].tolist()
    return ScoreOutput(
        logprob=sum(logprobs),
        token_ids=scores.token_ids[:, 0].tolist(),
        token_logprobs=logprobs,
        is_greedy=bool((scores.token_ids == scores.token_ids[:, :1]).all()),  # the best one is the token itself
        num_cached_tokens=seq.num_cached_tokens or 0,
    )


def _as_list(texts: Any, name: str) -> list[Any]:
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, dict | bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} must be a list of strings or lists of token ids, got {texts!r:.80}")
    return list(texts)


def _check_pair(inputs: InputProcessor, prompt: Any, continuation: Any, index: int) -> TextPair | ScoredIds:
    if isinstance(prompt, str) and isinstance(continuation, str):
        return _check_texts(inputs, prompt, continuation, index)
    if isinstance(prompt, str) or isinstance(continuation, str):
        raise TypeError(f"prompt {index} and its continuation must both be strings or both be lists of token ids")
    prompt_ids = inputs.check_ids(prompt, f"prompt {index}")
    return _join(inputs, prompt_ids, inputs.check_ids(continuation, f"continuation {index}"), index)


def _check_texts(inputs: InputProcessor, prompt: str, continuation: str, index: int) -> TextPair:
    if inputs.tokenizer is None:
        raise ValueError(f"prompt {index}: this model has no tokenizer, pass lists of token ids")
    check_unicode(prompt, f"prompt {index}")
    check_unicode(continuation, f"continuation {index}")
    if not continuation:
        raise ValueError(f"continuation {index}: is empty")
    stripped = prompt.rstrip()
    if not stripped and not len(inputs.tokenise([""])[0]):
        raise ValueError(
            f"prompt {index}: {prompt!r:.20} has nothing for a continuation to follow: this tokenizer begins texts "
            "with no token of its own. Pass token ids, with the prompt's [tokenizer.bos_token_id] or another one"
        )
    return stripped, prompt[len(stripped) :] + continuation


def _join(inputs: InputProcessor, prompt: "array[int]", continuation: "array[int]", index: int) -> ScoredIds:
    for ids, name in ((prompt, "prompt"), (continuation, "continuation")):
        if not len(ids):
            raise ValueError(f"{name} {index}: has no tokens")
    num_tokens = len(prompt) + len(continuation)
    name = f"prompt {index} and its continuation: have {num_tokens} tokens"
    if num_tokens - 1 > inputs.max_model_len:
        limit = inputs.max_model_len
        raise ValueError(f"{name}, but max_model_len={limit} leaves room for {limit} and one that is not computed")
    if num_tokens - 1 > inputs.num_kv_tokens:
        raise ValueError(f"{name}, but the whole KV cache holds {inputs.num_kv_tokens}, and one is not computed")
    return ScoredIds(prompt + continuation, len(prompt))
