"""The user's own logits processor: called on the device, once a step for all rows that ask for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.logits import LogitsRows
from tests.checkpoints import VOCAB_SIZE, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], num_kvcache_blocks=200)
    return engine


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def ban_even(logits: torch.Tensor, rows: LogitsRows) -> None:
    logits[:, ::2] = -torch.inf


def newest_plus_one(logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
    """Forces the token after the newest, which under this engine's schedule only the device knows."""
    newest = rows.token_ids.gather(1, rows.num_tokens[:, None].long() - 1)
    return torch.full_like(logits, -torch.inf).scatter_(1, (newest.long() + 1) % VOCAB_SIZE, 0.0)


def test_bans_tokens(llm: LLM) -> None:
    """In place, for the rows that ask and no others."""
    prompts = random_prompts([3, 5, 17, 9])
    plain = generate(llm, prompts, GREEDY)
    assert all(any(token % 2 == 0 for token in tokens) for tokens in plain)
    banned = replace(GREEDY, logits_processor=ban_even)
    outputs = generate(llm, prompts, [GREEDY, banned, GREEDY, banned])
    assert [outputs[0], outputs[2]] == [plain[0], plain[2]]
    for index in (1, 3):
        assert all(token % 2 for token in outputs[index])
        explicit = replace(GREEDY, allowed_token_ids=range(1, VOCAB_SIZE, 2))
        assert outputs[index] == generate(llm, [prompts[index]], explicit)[0]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 1}], ids=str)
def test_sees_the_newest_token(random_llama: Any, make_llm: Any, settings: dict[str, int]) -> None:
    """Guards against histories that are a token behind: the step is launched before the host has read it."""
    llm = make_llm(random_llama[0], **settings)
    prompts = random_prompts([1, 6, 17, 18])
    outputs = generate(llm, prompts, replace(GREEDY, logits_processor=newest_plus_one))
    assert outputs == [[(prompt[-1] + 1 + i) % VOCAB_SIZE for i in range(10)] for prompt in prompts]


def test_called_once_a_step(llm: LLM) -> None:
    """One call for all rows of a function, another one for the next function; each gets its own rows' tokens."""
    calls: list[tuple[str, int]] = []
    prompts = random_prompts([4, 7, 2, 5])
    seen: dict[int, list[int]] = {}

    def record(name: str, logits: torch.Tensor, rows: LogitsRows) -> None:
        calls.append((name, len(logits)))
        assert logits.dtype == torch.float32 and logits.shape[1] == VOCAB_SIZE
        lens = zip(rows.num_prompt_tokens.tolist(), rows.num_tokens.tolist(), rows.token_ids.tolist(), strict=True)
        for num_prompt_tokens, num_tokens, token_ids in lens:
            seen[num_prompt_tokens] = token_ids[:num_tokens]
            logits[:, 11] = 100.0

    def first(logits: torch.Tensor, rows: LogitsRows) -> None:
        record("first", logits, rows)

    def second(logits: torch.Tensor, rows: LogitsRows) -> None:
        record("second", logits, rows)

    params = [replace(GREEDY, max_tokens=3, logits_processor=one) for one in (first, second, first, None)]
    outputs = generate(llm, prompts, params)
    assert outputs[:3] == [[11, 11, 11]] * 3
    assert calls == [("first", 2), ("second", 1)] * 3
    assert seen == {len(prompt): [*prompt, 11, 11] for prompt in prompts[:3]}


def test_after_penalties_before_the_rest(llm: LLM) -> None:
    """The order that SamplingParams states: a processor sees allowed tokens and penalties, and is seen by min_tokens,
    temperature and filters; log-probabilities are those without it."""
    prompt = random_prompts([5])[0]
    logits: list[torch.Tensor] = []

    def flatten(own: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        logits.append(own.clone())
        flat = torch.full_like(own, -50.0)
        flat[:, [3, 4, 5]] = torch.tensor([3.0, 2.0, 1.0])
        return flat

    params = replace(
        GREEDY,
        temperature=1.0,
        seed=1,
        top_k=2,
        allowed_token_ids=(3, 4, 5, 6),
        repetition_penalty=2.0,
        min_tokens=10,
        stop_token_ids=(3,),
        logits_processor=flatten,
        logprobs=0,
        max_tokens=10,
    )
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert set(output["token_ids"]) == {4, 5}  # 3 is a stop token, and top_k leaves two
    first = logits[0][0]
    assert (first[[3, 4, 5, 6]] > -torch.inf).all()
    assert (first > -torch.inf).sum() == 4
    forced = replace(GREEDY, max_tokens=1, logprobs=0, logit_bias={output["token_ids"][0]: 100.0})
    assert llm.generate([prompt], forced, use_tqdm=False)[0]["logprobs"] == output["logprobs"][:1]
    penalised = replace(params, logits_processor=None, temperature=0, min_tokens=0, max_tokens=2, ignore_eos=True)
    tokens = generate(llm, [prompt], replace(penalised, stop_token_ids=()))[0]
    assert tokens[0] == int(first.argmax())


@pytest.mark.parametrize("result", [torch.zeros(2, 3), "logits", torch.zeros(VOCAB_SIZE)], ids=type)
def test_wrong_result(llm: LLM, result: Any) -> None:
    """Named, with the shape that was wanted; the engine goes on."""
    with pytest.raises(ValueError, match=r"logits_processor .* must return logits \(1, 320\)"):
        generate(llm, [[1]], replace(GREEDY, logits_processor=lambda logits, rows: result))
    assert generate(llm, [[1]], replace(GREEDY, max_tokens=1))


def test_failing_processor(llm: LLM) -> None:
    """Its error is the caller's, and nothing is left behind."""

    def fail(logits: torch.Tensor, rows: LogitsRows) -> None:
        raise RuntimeError("mine")

    expected = generate(llm, [[1, 2]], GREEDY)
    with pytest.raises(RuntimeError, match="mine"):
        generate(llm, [[1, 2], [3]], [GREEDY, replace(GREEDY, logits_processor=fail)])
    assert llm.is_finished() and llm.block_manager.num_used_blocks == 0
    assert generate(llm, [[1, 2]], GREEDY) == expected
