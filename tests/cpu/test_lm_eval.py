"""The evaluation harness gets from this engine what it gets from its own Hugging Face model. Needs `nanovllm[eval]` and
accelerate; CI has neither, and skips this file (`test_score.py` is what it runs)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate", reason="the harness's Hugging Face model imports it")

import datasets  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from benchmarks.throughput import load_hf  # noqa: E402
from nanovllm import LLM  # noqa: E402
from nanovllm.integrations.lm_eval import NanoLM, main  # noqa: E402
from tests.checkpoints import smollm2_path  # noqa: E402

MAX_LENGTH = 96
CHOICES = {
    "France": ["Paris", "Rome", "Lyon", "the city of Madrid"],
    "Japan": ["Kyoto", "Tokyo", "Beijing", "Osaka in the south"],
    "Italy": ["Milan", "Naples", "Rome", "Paris"],
    "Egypt": ["Cairo", "Giza", "Tripoli", "Khartoum"],
    "Peru": ["Quito", "Lima", "La Paz", "Bogotá"],
}
QUESTIONS = ["The capital of {} is", "{} has a capital. Its name is ", "Q: Which city governs {}?\nA:", "{}:"]
TEXTS = [
    "Rain fell on the harbour all night. In the morning the boats were full of water, and nobody went out to fish.",
    "def area(width, height):\n    return width * height\n",
    "A short one.",
    " ".join(f"On day {day} the caravan walked {day * 7 % 23} miles and found {day % 5} wells." for day in range(40)),
]


def task(name: str, output_type: str, rows: list[dict[str, Any]], metrics: list[str], **config: Any) -> dict[str, Any]:
    return {
        "task": name,
        "output_type": output_type,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": metric} for metric in metrics],
        **config,
    }


def tasks() -> list[dict[str, Any]]:
    answers = {"France": 0, "Japan": 1, "Italy": 2, "Egypt": 0, "Peru": 1}
    choices = [
        {"text": question.format(country), "choices": cities, "target": answers[country]}
        for question in QUESTIONS
        for country, cities in CHOICES.items()
    ]
    texts = [{"text": "", "target": text} for text in TEXTS]
    questions = [{"text": QUESTIONS[0].format(country), "target": f" {CHOICES[country][0]}"} for country in CHOICES]
    return [
        task("choices", "multiple_choice", choices, ["acc", "acc_norm"], doc_to_choice="{{choices}}"),
        task("few_shot", "multiple_choice", choices, ["acc"], doc_to_choice="{{choices}}", num_fewshot=2),
        task("texts", "loglikelihood_rolling", texts, ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
        task(
            "answers",
            "generate_until",
            questions,
            ["exact_match"],
            generation_kwargs={"until": ["\n", "."], "max_gen_toks": 16},
        ),
    ]


@pytest.fixture(scope="module")
def model() -> Iterator[NanoLM]:
    with LLM(str(smollm2_path()), device="cpu", dtype="float32", max_model_len=512, kvcache_block_size=16) as llm:
        yield NanoLM(llm, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def reference(model: NanoLM) -> Any:
    network = load_hf(str(smollm2_path()), torch.float32, torch.device("cpu"))
    return HFLM(network, tokenizer=model.tokenizer, max_length=MAX_LENGTH, batch_size=8, device="cpu")


@pytest.fixture
def tiny(byte_llama: Path, make_llm: Any) -> NanoLM:
    return NanoLM(make_llm(byte_llama), max_length=20)


def assert_close(own: Any, expected: Any) -> None:
    """Numbers to 1e-3, or in the sums of long texts to 1e-5 of them: over 49,152 logits, torch's float32 log-softmax
    on a CPU is 7e-6 a token above that of the same model in float64, and the engine's only 2e-7 off."""
    if isinstance(expected, list | tuple):
        assert len(own) == len(expected)
        for one, other in zip(own, expected, strict=True):
            assert_close(one, other)
    else:
        assert own == (pytest.approx(expected, abs=1e-3, rel=1e-5) if isinstance(expected, float) else expected)


def test_equals_hugging_face(model: NanoLM, reference: Any) -> None:
    """Each request's own result and each metric, for every kind of task; the last text takes several windows."""
    own, expected = (lm_eval.simple_evaluate(one, tasks=tasks(), bootstrap_iters=0) for one in (model, reference))
    assert len(expected["results"]) == len(tasks())
    for name, metrics in expected["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                print(f"{name:8s} {metric:20s} {own['results'][name][metric]:.6f} {value:.6f}")
                assert own["results"][name][metric] == pytest.approx(value, abs=1e-3), (name, metric)
    for name, samples in expected["samples"].items():
        assert len(own["samples"][name]) == len(samples) > 0
        for one, other in zip(own["samples"][name], samples, strict=True):
            assert_close(one["resps"], other["resps"])


def test_edges(model: NanoLM, reference: Any) -> None:
    """No prompt, one of spaces that the prompt's tokens end with, one that is longer than the model sees at once."""
    pairs = [
        ("", "Hello there"),
        ("One two ", "three"),
        ("Once\n\n", " upon"),
        (TEXTS[3], " and so on"),
        ("a", "b" * 60),
    ]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    assert_close(model.loglikelihood(requests, disable_tqdm=True), reference.loglikelihood(requests, disable_tqdm=True))
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "!"},
    ]
    for history, is_open in ((chat, True), (chat[:2], False)):
        text = model.apply_chat_template(history, is_open)
        assert text == reference.apply_chat_template(history, is_open)
        assert model.tok_encode(text) == reference.tok_encode(text)
    for name in ("prefix_token_id", "eot_token_id", "tokenizer_name", "max_length"):
        assert getattr(model, name) == getattr(reference, name)
    assert model.chat_template(True) == reference.chat_template(True)


def test_generation_settings(tiny: NanoLM) -> None:
    """do_sample decides, whatever the temperature; other names of max_gen_toks; a setting that isn't there is named."""
    assert tiny._sampling_params({"do_sample": False, "temperature": 0.7, "until": "x"}).is_greedy
    params = tiny._sampling_params({"do_sample": True, "top_p": 0.9, "max_new_tokens": 7, "until": ["", "\n"]})
    assert (params.temperature, params.top_p, params.max_tokens, params.stop) == (1.0, 0.9, 7, ("\n",))
    assert tiny._sampling_params({"temperature": 0.5}).temperature == 0.5
    assert tiny._sampling_params({}).max_tokens == tiny.max_gen_toks == 256
    with pytest.raises(ValueError, match="num_beams"):
        tiny._sampling_params({"num_beams": 4})


def test_limits(tiny: NanoLM) -> None:
    with pytest.raises(ValueError, match="max_gen_toks=20 leaves nothing of max_length=20"):
        tiny.generate_until([Instance("generate_until", {}, ("a", {"max_gen_toks": 20}), 0)])
    with pytest.raises(ValueError, match="21 tokens, more than max_length=20"):
        tiny.loglikelihood([Instance("loglikelihood", {}, ("a", "b" * 21), 0)], disable_tqdm=True)
    with pytest.raises(ValueError, match="max_length"):
        NanoLM(tiny.llm, max_length=100_000)
    with pytest.raises(TypeError, match="dtype"):
        NanoLM(tiny.llm, dtype="float32")


def test_command_and_cache(byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's command, on a task of the user's own; run again, it finds every answer in the harness's cache."""
    (tmp_path / "rows.py").write_text(
        "import datasets\ndef load(**_):\n"
        "    return {'test': datasets.Dataset.from_list([{'text': t, 'target': t[::-1]} for t in ('ab', 'cd')])}\n"
    )
    for kind in ("generate_until", "loglikelihood", "loglikelihood_rolling"):
        metric = {"generate_until": "exact_match", "loglikelihood": "acc"}.get(kind, "bits_per_byte")
        (tmp_path / f"{kind}.yaml").write_text(
            f"task: own_{kind}\noutput_type: {kind}\ncustom_dataset: !function rows.load\ntest_split: test\n"
            f"doc_to_text: '{{{{text}}}}'\ndoc_to_target: '{{{{target}}}}'\nmetric_list: [{{metric: {metric}}}]\n"
        )
    arguments = {
        "model": "nanovllm",
        "model_args": f"pretrained={byte_llama},num_kvcache_blocks=64,max_length=300",
        "tasks": "own_generate_until,own_loglikelihood,own_loglikelihood_rolling",
        "include_path": str(tmp_path),
        "output_path": str(tmp_path / "out.json"),
        "use_cache": str(tmp_path / "cache"),
    }
    command = ["lm_eval", *(word for name, value in arguments.items() for word in (f"--{name}", value))]
    results = []
    for _ in range(2):
        monkeypatch.setattr("sys.argv", command.copy())
        main()
        (path,) = tmp_path.glob("out*.json")
        results.append(json.loads(path.read_text())["results"])
        path.unlink()
        for name in ("generate", "score"):
            monkeypatch.setattr(LLM, name, lambda *args, **kwargs: pytest.fail("the cache was not used"))
    assert results[0] == results[1] and len(results[0]) == 3
    assert get_model("nanovllm") is NanoLM
