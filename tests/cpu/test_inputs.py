"""What users hand in: accepted and taken literally, or refused by index before any work."""

import copy
import math
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, save_byte_tokenizer, save_markov_model, save_random_model

MAX_MODEL_LEN = 40
NUM_TOKENIZER_IDS = 300
BOS = 256
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
GOOD_PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def shared_llm(byte_llama: Path, make_shared_llm: Any) -> LLM:
    llm: LLM = make_shared_llm(byte_llama, max_model_len=MAX_MODEL_LEN)
    return llm


@pytest.fixture(scope="module")
def good_tokens(byte_llama: Path, make_shared_llm: Any) -> list[int]:
    """What GOOD_PROMPT gives on an engine that never saw an error."""
    llm = make_shared_llm(byte_llama, max_model_len=MAX_MODEL_LEN)
    tokens: list[int] = llm.generate([GOOD_PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]
    return tokens


@pytest.fixture
def llm(shared_llm: LLM, good_tokens: list[int], assert_idle: Any) -> Iterator[LLM]:
    """The shared engine. Whatever a test did to it, it must be idle and right afterwards."""
    yield shared_llm
    try:
        assert_idle(shared_llm)
    finally:
        while not shared_llm.is_finished():  # so that the next test begins clean
            shared_llm.step()
    assert shared_llm.generate([GOOD_PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"] == good_tokens


@pytest.fixture
def bos_llm(tmp_path: Path, make_llm: Any) -> LLM:
    """An engine whose tokenizer begins every text with <s>."""
    save_random_model(tmp_path)
    save_byte_tokenizer(tmp_path, add_bos=True)
    llm: LLM = make_llm(tmp_path)
    return llm


def prompt_ids(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    """The prompts as the model saw them."""
    return [output["prompt_token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


# Lengths


@pytest.mark.parametrize("kind", ["ids", "text"])
@pytest.mark.parametrize("length", [1, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1])
def test_prompt_that_leaves_room(llm: LLM, length: int, kind: str) -> None:
    """Guards against an off-by-one at max_model_len: a prompt one short of it still gets its one token."""
    prompt: Any = "x" * length if kind == "text" else [ord("x")] * length
    (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=1000), use_tqdm=False)
    assert len(output["token_ids"]) == MAX_MODEL_LEN - length
    assert output["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [[1] * MAX_MODEL_LEN, [1] * (MAX_MODEL_LEN + 1), "x" * MAX_MODEL_LEN, [1] * 100_000])
def test_prompt_too_long(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match=rf"prompt 2: has {len(prompt)} tokens, .*{MAX_MODEL_LEN}"):
        llm.generate([[1], "a", prompt, [2]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=f"{len(prompt)} tokens"):
        llm.add_request(prompt, GREEDY)


def test_max_model_len_is_capped_by_the_model(byte_llama: Path, make_llm: Any) -> None:
    """The model was made for 512 tokens: more are refused although the config allows them."""
    llm = make_llm(byte_llama, max_model_len=4096, kvcache_block_size=64)
    assert llm.max_model_len == 512
    assert llm.config.max_model_len == 4096  # a derived size is not written back
    (output,) = llm.generate([[1] * 510], replace(GREEDY, max_tokens=9), use_tqdm=False)
    assert len(output["token_ids"]) == 2
    with pytest.raises(ValueError, match="prompt 0: has 512 tokens"):
        llm.generate([[1] * 512], GREEDY, use_tqdm=False)


# Empty prompts


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.generate([], []) == []
    assert llm.generate(()) == []


@pytest.mark.parametrize(
    ("prompts", "index"),
    [
        ([""], 0),
        ([[]], 0),
        (["a", "", "b"], 1),
        ([[1], "a", ()], 2),
        ([np.array([], dtype=np.int64)], 0),
        ([array("i")], 0),
        ("", 0),
    ],
)
def test_empty_prompt(llm: LLM, prompts: Any, index: int) -> None:
    with pytest.raises(ValueError, match=f"prompt {index}: is empty"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="empty"):
        llm.add_request(prompts[index] if prompts else "", GREEDY)


def test_empty_text_under_bos(bos_llm: LLM) -> None:
    """A text that the tokenizer makes something of is not empty."""
    assert prompt_ids(bos_llm, ["", "a"]) == [[BOS], [BOS, ord("a")]]
    with pytest.raises(ValueError, match="prompt 1: is empty"):
        bos_llm.generate(["", []], GREEDY, use_tqdm=False)


# Token ids


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        array("q", [5, 6, 7]),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        np.array([5, 0, 6, 0, 7])[::2],
        [np.int64(5), np.int32(6), np.uint8(7)],
        torch.tensor([5, 6, 7]),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_sequences_of_ids(llm: LLM, prompt: Any, good_tokens: list[int]) -> None:
    """Guards against ids being read as bytes of another width."""
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output["prompt_token_ids"] == [5, 6, 7]
    assert all(type(token_id) is int for token_id in output["prompt_token_ids"])
    assert output["token_ids"] == good_tokens


def test_array_of_prompts(llm: LLM) -> None:
    assert prompt_ids(llm, np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert prompt_ids(llm, iter(([1], "a"))) == [[1], [ord("a")]]


@pytest.mark.parametrize("token_id", [-1, -(2**31), VOCAB_SIZE, 2**31, 2**32, 2**40])
def test_id_outside_the_vocabulary(llm: LLM, token_id: int) -> None:
    """Guards against ids that wrap around, or that reach the embedding: on a GPU they end the process's use of it."""
    with pytest.raises(ValueError, match=f"prompt 1: token id {token_id} at position 2 is outside .*{VOCAB_SIZE}"):
        llm.generate([[1], [1, 2, token_id, 3]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=str(token_id)):
        llm.add_request([token_id], GREEDY)


@pytest.mark.parametrize("token_id", [2**63, 2**64, -(2**63) - 1, 10**30])
def test_id_beyond_63_bits(llm: LLM, token_id: int) -> None:
    with pytest.raises((ValueError, TypeError), match="prompt 1"):
        llm.generate([[1], [1, token_id]], GREEDY, use_tqdm=False)


def test_ids_that_the_tokenizer_lacks_are_accepted(llm: LLM) -> None:
    """The model has rows for them; only the tokenizer has not."""
    assert prompt_ids(llm, [[NUM_TOKENIZER_IDS, VOCAB_SIZE - 1]]) == [[NUM_TOKENIZER_IDS, VOCAB_SIZE - 1]]


@pytest.mark.parametrize(
    "prompt",
    [
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        [1, [2]],
        [[]],
        [1.0, 2.0],
        [1, 2.5],
        [math.nan],
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.array(3),
        [True, False],
        [None],
        [1, None],
        ["a", "b"],
        ["1"],
        [1, "a"],
        [b"a"],
        [{}],
        None,
        5,
        2.5,
        True,
        b"abc",
        {"prompt_token_ids": [1]},
        {},
        {1, 2},
        frozenset([1]),
        object(),
        (token_id for token_id in (1, 2)),
    ],
    ids=lambda prompt: repr(prompt)[:30],
)
def test_prompt_of_a_wrong_type(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt 2: must be"):
        llm.generate([[1], "a", prompt], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="prompt 0: must be"):
        llm.add_request(prompt, GREEDY)


@pytest.mark.parametrize("prompts", [[1, 2, 3], [0], np.array([1, 2]), (1,), range(3)], ids=repr)
def test_flat_list_of_ids_as_prompts(llm: LLM, prompts: Any) -> None:
    """Guards against taking one prompt's ids for a list of prompts."""
    with pytest.raises(TypeError, match="prompt 0: must be"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"prompt": "a"}, {}, object(), np.array(3)], ids=repr)
def test_prompts_of_a_wrong_type(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_error_after_good_prompts_queues_nothing(llm: LLM) -> None:
    """Guards against the prompts before a bad one being left in the queue."""
    for bad in ([-1], [], None):
        with pytest.raises((TypeError, ValueError), match="prompt 50"):
            llm.generate([GOOD_PROMPT] * 50 + [bad], GREEDY, use_tqdm=False)
        assert llm.is_finished()


# Text


def test_text_and_ids_mixed(llm: LLM) -> None:
    """Guards against texts and ids changing places when the texts are tokenised together."""
    prompts = ["ab", [1, 2], "é", (3,), "x", np.array([4, 5])]
    assert prompt_ids(llm, prompts) == [[97, 98], [1, 2], [0xC3, 0xA9], [3], [120], [4, 5]]


def test_one_string(llm: LLM) -> None:
    """Guards against a string being taken for a list of characters."""
    assert prompt_ids(llm, "abc") == [[97, 98, 99]]


def test_bos_once(bos_llm: LLM) -> None:
    """Guards against a second <s> before a text that a chat template has begun, and against touching ids."""
    prompts = ["hi", "<s>hi", "<s><s>hi", "a<s>", [104, 105], [BOS, 104], [BOS, BOS, 104]]
    assert prompt_ids(bos_llm, prompts) == [
        [BOS, 104, 105],
        [BOS, 104, 105],
        [BOS, BOS, 104, 105],  # what it says, but no third one
        [BOS, 97, BOS],
        [104, 105],
        [BOS, 104],
        [BOS, BOS, 104],
    ]


def test_text_without_bos(llm: LLM) -> None:
    """A tokenizer that adds none adds none, and <s> in a text is the special token."""
    assert prompt_ids(llm, ["hi", "<s>hi", "hi</s>"]) == [[104, 105], [BOS, 104, 105], [104, 105, 257]]


def test_text_without_a_tokenizer(random_llama: Any, make_llm: Any, assert_idle: Any) -> None:
    llm = make_llm(random_llama[0])
    for prompts in (["a"], [[1], "a"], "a"):
        with pytest.raises(ValueError, match="tokenizer"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.add_request("a", GREEDY)
    assert_idle(llm)
    (output,) = llm.generate([[1]], GREEDY, use_tqdm=False)
    assert output["text"] == ""
    assert len(output["token_ids"]) == 3


def test_tokenizer_with_more_ids_than_the_model(tmp_path: Path, make_llm: Any, assert_idle: Any) -> None:
    """Guards against a text's ids reaching the embedding unchecked: specials that were added to a tokenizer, but
    not to the model."""
    save_random_model(tmp_path)
    tokenizer = save_byte_tokenizer(tmp_path, num_specials=80)
    llm = make_llm(tmp_path)
    assert tokenizer.convert_tokens_to_ids("<x70>") == 326 >= VOCAB_SIZE
    assert prompt_ids(llm, ["a<x50>"]) == [[97, 306]]
    with pytest.raises(ValueError, match=r"prompt 1: token id 326 at position 1 .*320"):
        llm.generate(["a", "b<x70>c"], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert len(llm.generate(["a"], GREEDY, use_tqdm=False)[0]["token_ids"]) == 3


def test_ids_beyond_the_tokenizer_are_never_sampled(tmp_path: Path, make_llm: Any) -> None:
    """Guards against ids without text: the model's favourites are rows that the tokenizer doesn't have."""
    logits = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    logits[:, NUM_TOKENIZER_IDS:] = 20.0
    logits[:, NUM_TOKENIZER_IDS - 1] = 2.0
    save_markov_model(tmp_path, logits)
    save_byte_tokenizer(tmp_path, num_specials=NUM_TOKENIZER_IDS - 256)
    llm = make_llm(tmp_path)
    greedy, drawn, filtered = llm.generate(
        [[1], [310], [1]],
        [
            GREEDY,
            SamplingParams(max_tokens=150, ignore_eos=True, seed=0),
            SamplingParams(max_tokens=150, ignore_eos=True, seed=0, top_k=NUM_TOKENIZER_IDS, top_p=0.99),
        ],
        use_tqdm=False,
    )
    assert greedy["token_ids"] == [NUM_TOKENIZER_IDS - 1] * 3
    for output in (drawn, filtered):
        assert max(output["token_ids"]) < NUM_TOKENIZER_IDS
        assert len(set(output["token_ids"])) > 50


# Sampling params


def test_max_tokens_of_each_prompt(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=num_tokens) for num_tokens in (1, 5, 9)]
    outputs = llm.generate([GOOD_PROMPT] * 3, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [1, 5, 9]
    outputs = llm.generate([GOOD_PROMPT] * 3, tuple(reversed(params)), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [9, 5, 1]


@pytest.mark.parametrize(("num_prompts", "num_params"), [(3, 2), (3, 4), (3, 1), (1, 2), (3, 0), (0, 1)])
def test_params_of_another_number(llm: LLM, num_prompts: int, num_params: int) -> None:
    with pytest.raises(ValueError, match=f"{num_prompts} prompts, but {num_params} sampling params"):
        llm.generate([GOOD_PROMPT] * num_prompts, [GREEDY] * num_params, use_tqdm=False)


@pytest.mark.parametrize(
    "params", [{"max_tokens": 3}, 5, "greedy", [GREEDY, None], [GREEDY, {}], SamplingParams], ids=repr
)
def test_params_of_a_wrong_type(llm: LLM, params: Any) -> None:
    match = "SamplingParams" if isinstance(params, list) else "sampling_params must be SamplingParams or a list of them"
    with pytest.raises(TypeError, match=match):
        llm.generate([[1], [2]], params, use_tqdm=False)


def test_default_params(llm: LLM) -> None:
    """None means SamplingParams(): at most 64 tokens, and here what the model can hold."""
    for output in llm.generate([GOOD_PROMPT] * 2, use_tqdm=False):
        assert 1 <= len(output["token_ids"]) <= MAX_MODEL_LEN - len(GOOD_PROMPT)


def test_stop_token_outside_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[-1])  # type: ignore[arg-type]
    bad = SamplingParams(stop_token_ids=(1, VOCAB_SIZE))
    with pytest.raises(ValueError, match=f"sampling params 1: stop token {VOCAB_SIZE} .*{VOCAB_SIZE}"):
        llm.generate([[1], [2]], [GREEDY, bad], use_tqdm=False)
    with pytest.raises(ValueError, match=f"{VOCAB_SIZE}"):
        llm.add_request([1], bad)


def test_stop_token_that_is_never_sampled(llm: LLM) -> None:
    """Guards against an id between the tokenizer's and the model's number of ids being looked up among the logits
    that are sampled: it is legal, and only never comes."""
    params = replace(GREEDY, stop_token_ids=(NUM_TOKENIZER_IDS + 5,), min_tokens=2)
    (output,) = llm.generate([GOOD_PROMPT], params, use_tqdm=False)
    assert len(output["token_ids"]) == 3
    assert output["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (ValueError, {"max_tokens": 0}),
        (ValueError, {"max_tokens": -1}),
        (TypeError, {"max_tokens": 1.5}),
        (TypeError, {"max_tokens": True}),
        (TypeError, {"max_tokens": None}),
        (ValueError, {"temperature": -0.1}),
        (TypeError, {"temperature": "hot"}),
        (TypeError, {"temperature": None}),
        (ValueError, {"top_p": 0.0}),
        (ValueError, {"top_p": 1.01}),
        (ValueError, {"top_p": math.nan}),
        (ValueError, {"top_k": -2}),
        (TypeError, {"top_k": 1.0}),
        (ValueError, {"min_p": -0.1}),
        (ValueError, {"min_p": 1.1}),
        (ValueError, {"min_p": math.nan}),
        (ValueError, {"seed": -1}),
        (ValueError, {"seed": 2**64}),
        (TypeError, {"seed": 1.0}),
        (TypeError, {"seed": True}),
        (ValueError, {"min_tokens": -1}),
        (ValueError, {"min_tokens": 65}),
        (TypeError, {"ignore_eos": 1}),
        (TypeError, {"skip_special_tokens": None}),
        (TypeError, {"stop_token_ids": "12"}),
        (TypeError, {"stop_token_ids": 5}),
        (TypeError, {"stop_token_ids": [1.0]}),
        (TypeError, {"stop_token_ids": [None]}),
        (TypeError, {"stop_token_ids": [True]}),
    ],
    ids=str,
)
def test_impossible_params(error: type[Exception], settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(error, match=name):
        SamplingParams(**settings)


def test_numpy_params(llm: LLM) -> None:
    """numpy's numbers are numbers."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(4),
        top_k=np.int32(9),
        top_p=np.float64(0.9),
        seed=np.uint64(2**63),
        stop_token_ids=np.array([300]),  # type: ignore[arg-type]
        ignore_eos=True,
    )
    plain = SamplingParams(
        temperature=0.5, max_tokens=4, top_k=9, top_p=0.9, seed=2**63, stop_token_ids=(300,), ignore_eos=True
    )
    outputs = llm.generate([GOOD_PROMPT] * 2, [params, plain], use_tqdm=False)
    assert outputs[0] == outputs[1] | {"num_cached_tokens": outputs[0]["num_cached_tokens"]}
    assert len(outputs[0]["token_ids"]) == 4


# Callers


def test_callers_objects_are_unchanged(llm: LLM) -> None:
    """Guards against outputs being appended to the caller's prompt, and limits clipped in the caller's params."""
    ids, numbers, ids_array = [1, 2, 3], np.array([4, 5]), array("i", [6, 7])
    prompts: list[Any] = [ids, "abc", numbers, ids_array]
    stop_ids = [9]
    params = [SamplingParams(max_tokens=1000, stop_token_ids=stop_ids) for _ in prompts]  # type: ignore[arg-type]
    before = copy.deepcopy((prompts, params))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert prompts[0] is ids and prompts[2] is numbers and prompts[3] is ids_array
    assert [list(prompt) for prompt in prompts] == [list(prompt) for prompt in before[0]]
    assert params == before[1]
    assert stop_ids == [9]
    # And the other way: what the caller does to a result stays there.
    first = copy.deepcopy(outputs[0])
    outputs[0]["token_ids"].append(-1)
    outputs[0]["prompt_token_ids"].clear()
    assert ids == [1, 2, 3]
    again = llm.generate([ids], replace(GREEDY, max_tokens=1), use_tqdm=False)[0]
    assert again["prompt_token_ids"] == first["prompt_token_ids"]


def test_prompt_changed_after_add_request(llm: LLM, good_tokens: list[int]) -> None:
    """Guards against a queued request reading the caller's list later."""
    for prompt in (list(GOOD_PROMPT), array("i", GOOD_PROMPT), np.array(GOOD_PROMPT, dtype=np.int32)):
        seq_id = llm.add_request(prompt, GREEDY)  # type: ignore[arg-type]
        for position in range(3):
            prompt[position] = 0
        finished: dict[int, Any] = {}
        while not llm.is_finished():
            finished.update(llm.step().finished)
        assert finished[seq_id]["prompt_token_ids"] == GOOD_PROMPT
        assert finished[seq_id]["token_ids"] == good_tokens


def test_unknown_keywords(byte_llama: Path, llm: LLM) -> None:
    """A misspelt setting is never ignored, and the nearest one is named."""
    with pytest.raises(TypeError, match=r"'max_num_sequences'.*'max_num_seqs'"):
        LLM(str(byte_llama), max_num_sequences=4)
    with pytest.raises(TypeError, match=r"'gpu_memory_utilisation'.*'gpu_memory_utilization'"):
        LLM(str(byte_llama), gpu_memory_utilisation=0.5)
    with pytest.raises(TypeError):
        LLM(str(byte_llama), model=str(byte_llama))
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temperature"):
        llm.generate([[1]], temperature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("prompt", [[1, True], bytearray(b"abc")])
def test_what_only_looks_like_token_ids(llm: LLM, prompt: Any) -> None:
    """numpy would take both for integers."""
    with pytest.raises(TypeError, match="prompt 1"):
        llm.generate([GOOD_PROMPT, prompt], GREEDY, use_tqdm=False)


def test_lone_surrogate(llm: LLM) -> None:
    """No tokenizer can encode it, and its own error names no prompt."""
    with pytest.raises(ValueError, match=r"prompt 1: .*surrogate"):
        llm.generate(["a", "\ud800"], GREEDY, use_tqdm=False)


def test_nothing_but_stop_tokens(llm: LLM) -> None:
    """With every token banned until min_tokens, the sampler would have nothing to choose from."""
    params = replace(GREEDY, stop_token_ids=tuple(range(NUM_TOKENIZER_IDS)), min_tokens=2)
    with pytest.raises(ValueError, match="min_tokens=2"):
        llm.generate([GOOD_PROMPT], params, use_tqdm=False)
