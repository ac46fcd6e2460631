"""Checkpoint directories: what is read, what is ignored, and what is refused with which words."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import nanovllm.utils.checkpoint
from nanovllm import LLM, SamplingParams
from tests.checkpoints import (
    VOCAB_SIZE,
    load_reference,
    random_prompts,
    reference_greedy,
    refusal,
    save_byte_tokenizer,
    save_markov_model,
    save_random_model,
    write_json,
)

NUM_TOKENS = 12
PROMPTS = random_prompts((3, 17))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
INDEX = "model.safetensors.index.json"

Tokens = list[list[int]]


def generate(llm: LLM) -> Tokens:
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def reference_tokens(model: Any) -> Tokens:
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokens]:
    """A good untied model that no test changes, and its tokens by transformers."""
    folder = tmp_path_factory.mktemp("pristine")
    return folder, reference_tokens(save_random_model(folder))


@pytest.fixture
def folder(pristine: tuple[Path, Tokens], tmp_path: Path) -> Path:
    """A copy of the good model, to be damaged."""
    return Path(shutil.copytree(pristine[0], tmp_path / "model"))


@pytest.fixture
def expected(pristine: tuple[Path, Tokens]) -> Tokens:
    return pristine[1]


@pytest.fixture
def refuse(pristine: tuple[Path, Tokens], make_llm: Callable[..., LLM]) -> Callable[..., str]:
    """`refuse(model, pattern)` asserts that a model is refused with a message, and that the failure has left nothing
    behind: a good model loads and runs afterwards. Gives the message."""

    def check(model: Any, pattern: str, error: type[Exception] = ValueError, **kwargs: Any) -> str:
        message = refusal(model, error, **kwargs)
        assert re.search(pattern, message), message
        assert torch.get_default_dtype() is torch.float32
        assert generate(make_llm(pristine[0])) == pristine[1]
        return message

    return check


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, Any]) -> None:
    """Replaces the single file by several and an index."""
    (folder / "model.safetensors").unlink()
    for file_name, tensors in shards.items():
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def split(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """The model's tensors in two shards, alternately, so that merged projections come from both; and the index."""
    shards: dict[str, dict[str, torch.Tensor]] = {
        "model-00001-of-00002.safetensors": {},
        "model-00002-of-00002.safetensors": {},
    }
    weight_map = {}
    for number, (name, tensor) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        file_name = sorted(shards)[number % 2]
        shards[file_name][name] = tensor
        weight_map[name] = file_name
    return shards, weight_map


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Sets tensors of the single file; `...` removes one, and `__` in a name stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not ...}, path, metadata={"format": "pt"})


# Which files are read


def test_single_file(pristine: tuple[Path, Tokens], make_llm: Callable[..., LLM]) -> None:
    """The base of all tests here: the good model is good, and its two prompts go different ways."""
    tokens = generate(make_llm(pristine[0]))
    assert tokens == pristine[1]
    assert tokens[0] != tokens[1]


def test_shards_equal_single_file(folder: Path, expected: Tokens, make_llm: Callable[..., LLM]) -> None:
    """Guards against a part of a merged projection being lost when the others come from another file."""
    write_shards(folder, *split(folder))
    assert generate(make_llm(folder)) == expected


def test_shards_without_index(folder: Path, expected: Tokens, make_llm: Callable[..., LLM]) -> None:
    """Without an index, every file counts."""
    write_shards(folder, *split(folder))
    (folder / INDEX).unlink()
    assert generate(make_llm(folder)) == expected


def test_index_decides(folder: Path, expected: Tokens, make_llm: Callable[..., LLM]) -> None:
    """A tensor is taken from the file that the index names, though another listed file has one of that name, before
    and after it; files that the index doesn't list are not read at all."""
    shards, weight_map = split(folder)
    first, second = shards.values()
    decoys = {name: torch.full_like(tensor, 3.0) for name, tensor in (first | second).items()}
    for name in weight_map:
        for tensors in (first, second):
            tensors.setdefault(name, decoys[name])
    write_shards(folder, shards, weight_map)
    for file_name in ("a-stray.safetensors", "model-00003-of-00002.safetensors", "z.safetensors"):
        save_file(decoys | {"no.such.tensor": torch.ones(1)}, folder / file_name)
    (folder / "broken.safetensors").write_bytes(b"not read")
    assert generate(make_llm(folder)) == expected


@pytest.mark.parametrize("num_bytes", [1, 20_000])
def test_files_are_reopened(
    num_bytes: int, folder: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch, make_llm: Callable[..., LLM]
) -> None:
    """Large files are closed and opened again on the way, to give their pages back: no tensor may be skipped or
    read twice at the seams."""
    monkeypatch.setattr(nanovllm.utils.checkpoint, "_REOPEN_AFTER_BYTES", num_bytes)
    assert generate(make_llm(folder)) == expected
    write_shards(folder, *split(folder))
    assert generate(make_llm(folder)) == expected


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors", "a.safetensors"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["single", "sharded"])
def test_other_files_beside(
    name: str, is_sharded: bool, folder: Path, expected: Tokens, make_llm: Callable[..., LLM]
) -> None:
    """Mistral's repositories hold the same weights twice, the second time under other names."""
    if is_sharded:
        write_shards(folder, *split(folder))
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, folder / name)
    assert generate(make_llm(folder)) == expected


# Which tensors are wanted


def test_saved_rotary_tables_are_ignored(folder: Path, expected: Tokens, make_llm: Callable[..., LLM]) -> None:
    """Older checkpoints saved them; in wrong dtypes, so they must not be used."""
    tables = {
        f"model.layers.{layer}.self_attn.rotary_emb.{name}": torch.full((8,), 9.0)
        for layer in range(2)
        for name in ("inv_freq", "cos_cached", "sin_cached")
    }
    edit_tensors(folder, **tables, **{"model.rotary_emb.inv_freq": torch.full((8,), 9.0)})
    assert generate(make_llm(folder)) == expected


@pytest.mark.parametrize("lm_head", ["none", "same", "other"])
def test_tied(lm_head: str, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """A tied head is the embedding, whether the file repeats it or not, and even if the repetition is wrong."""
    model = save_random_model(tmp_path, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach()
    extra = {"none": ..., "same": embedding.clone(), "other": embedding.flip(0).contiguous()}
    edit_tensors(tmp_path, lm_head__weight=extra[lm_head])
    assert generate(make_llm(tmp_path)) == reference_tokens(model)


def test_untied_without_lm_head(folder: Path, refuse: Callable[..., str]) -> None:
    """Guards against falling back to the embedding, which would talk nonsense."""
    edit_tensors(folder, lm_head__weight=...)
    refuse(folder, r"lm_head\.weight is missing")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_missing_tensor(name: str, folder: Path, refuse: Callable[..., str]) -> None:
    """No parameter may be left uninitialised: the error names the checkpoint's tensor, not a merged parameter."""
    edit_tensors(folder, **{name: ...})
    assert "qkv_proj" not in refuse(folder, name.replace(".", r"\.") + " is missing")


def test_missing_bias(tmp_path: Path, refuse: Callable[..., str]) -> None:
    """Qwen2 has biases: a file without one is damaged, not bias-free."""
    save_random_model(tmp_path, "qwen2")
    edit_tensors(tmp_path, **{"model.layers.1.self_attn.v_proj.bias": ...})
    refuse(tmp_path, r"model\.layers\.1\.self_attn\.v_proj\.bias is missing")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.2.input_layernorm.weight",
        "score.weight",
        "model.layers.0.self_attn.rotary_emb.other",
    ],
)
def test_unknown_tensor(name: str, folder: Path, refuse: Callable[..., str]) -> None:
    """A tensor that nothing reads means that the model computes something else than this decoder."""
    edit_tensors(folder, **{name: torch.ones(16)})
    refuse(folder, name.replace(".", r"\.") + " is unknown to LlamaForCausalLM")


def test_many_unknown_tensors_are_summed_up(folder: Path, refuse: Callable[..., str]) -> None:
    """An error that lists thousands of names hides what went wrong."""
    edit_tensors(folder, **{f"other.{index}": torch.ones(1) for index in range(500)})
    assert len(refuse(folder, "495 more")) < 500


@pytest.mark.parametrize("num_layers", [1, 3])
def test_other_number_of_layers(num_layers: int, folder: Path, refuse: Callable[..., str]) -> None:
    """A layer too few in the config must not drop the file's last one silently."""
    write_json(folder, "config.json", num_hidden_layers=num_layers)
    refuse(folder, r"model\.layers\.[12]\..*(unknown|missing)")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.self_attn.q_proj.weight", [32, 64], [64, 64]),
        ("model.layers.1.self_attn.k_proj.weight", [64, 64], [32, 64]),
        ("model.layers.0.mlp.down_proj.weight", [96, 64], [64, 96]),  # transposed
        ("model.norm.weight", [1], [64]),  # would broadcast
        ("model.embed_tokens.weight", [300, 64], [320, 64]),
        ("lm_head.weight", [320, 1], [320, 64]),  # would broadcast
    ],
)
def test_wrong_shape(name: str, shape: list[int], wanted: list[int], folder: Path, refuse: Callable[..., str]) -> None:
    """Guards against broadcasting and truncating: name and both shapes are in the error."""
    edit_tensors(folder, **{name: torch.ones(shape)})
    message = refuse(folder, name.replace(".", r"\."))
    assert str(shape) in message and str(wanted) in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32], ids=str)
def test_integer_weights_are_refused(dtype: torch.dtype, folder: Path, refuse: Callable[..., str]) -> None:
    """Integers are codes of a quantized checkpoint, also where its config doesn't say so: not to be read as values."""
    edit_tensors(folder, **{"model.layers.0.mlp.down_proj.weight": torch.ones(64, 96, dtype=dtype)})
    refuse(folder, r"model\.layers\.0\.mlp\.down_proj\.weight")


# Damaged files


@pytest.mark.parametrize("content", ["half", "header only", "empty", "html", "not a header"])
def test_damaged_weights(content: str, folder: Path, refuse: Callable[..., str]) -> None:
    """A broken download is an error that names the file."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    damaged = {
        "half": whole[: len(whole) // 2],
        "header only": whole[:header_end],
        "empty": b"",
        "html": b"<!doctype html><title>404</title>",
        "not a header": (64).to_bytes(8, "little") + b"x" * 64,
    }
    path.write_bytes(damaged[content])
    refuse(folder, "model.safetensors")


def test_damaged_shard(folder: Path, refuse: Callable[..., str]) -> None:
    """The error names the one of many files."""
    write_shards(folder, *split(folder))
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuse(folder, path.name)


def test_index_names_missing_file(folder: Path, refuse: Callable[..., str]) -> None:
    """An incomplete download is noticed before anything is loaded."""
    write_shards(folder, *split(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuse(folder, "model-00002-of-00002.safetensors is named in the index but missing")


def test_index_names_tensor_that_the_file_lacks(folder: Path, refuse: Callable[..., str]) -> None:
    """Guards against searching the other files for it."""
    shards, weight_map = split(folder)
    weight_map["model.norm.weight"] = next(name for name in shards if name != weight_map["model.norm.weight"])
    write_shards(folder, shards, weight_map)
    refuse(folder, r"model\.norm\.weight")


@pytest.mark.parametrize("way", ["../outside.safetensors", "sub/../../outside.safetensors", "absolute"])
def test_index_cannot_leave_the_folder(way: str, folder: Path, refuse: Callable[..., str]) -> None:
    """A downloaded index must not make the engine read other files of this machine."""
    shards, weight_map = split(folder)
    write_shards(folder, shards, weight_map)
    outside = folder.parent / "outside.safetensors"
    (folder / "sub").mkdir()
    shutil.move(folder / "model-00002-of-00002.safetensors", outside)
    target = str(outside) if way == "absolute" else way
    renamed = {
        name: target if file_name.startswith("model-00002") else file_name for name, file_name in weight_map.items()
    }
    write_json(folder, INDEX, weight_map=renamed)
    refuse(folder, r"outside\.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": {}}',
        '{"weight_map": ["model.safetensors"]}',
        '{"weight_map": {"model.norm.weight": 1}}',
    ],
)
def test_damaged_index(content: str, folder: Path, refuse: Callable[..., str]) -> None:
    """Whatever an index holds, a bad one is a ValueError about the index, not a KeyError or AttributeError."""
    (folder / INDEX).write_text(content)
    refuse(folder, "index")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\x00\xff", '{"model_type": '])
def test_damaged_json(name: str, content: str, folder: Path, refuse: Callable[..., str]) -> None:
    """The error names the file."""
    (folder / name).write_text(content, encoding="latin-1")
    refuse(folder, name)


def test_damaged_tokenizer(folder: Path, refuse: Callable[..., str]) -> None:
    """A tokenizer that can't be read is an error, not a model without a tokenizer."""
    save_byte_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    refuse(folder, "tokenizer")


# What is not a model


def test_empty_directory(tmp_path: Path, refuse: Callable[..., str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(empty, "MODEL: not a model directory, it has no config.json")


def test_no_weights(folder: Path, refuse: Callable[..., str]) -> None:
    """The message says what is wanted."""
    (folder / "model.safetensors").unlink()
    refuse(folder, r"needs weights as \*\.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_loaded(name: str, folder: Path, tmp_path: Path, refuse: Callable[..., str]) -> None:
    """Unpickling runs the file's code: a directory with nothing else is refused, and says why."""
    marker = tmp_path / "unpickled"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Trap(marker)))
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the trap doesn't work"
    marker.unlink()
    refuse(folder, name.replace(".", r"\."))
    assert not marker.exists()


class _Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def remote_code(folder: Path, tmp_path: Path) -> Path:
    """Gives the model a config, a model and a tokenizer in Python that make a marker file; returns the marker."""
    marker = tmp_path / "executed"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    classes = "class EvilConfig: pass\nclass EvilModel: pass\nclass EvilTokenizer: pass\n"
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(code + classes)
    save_byte_tokenizer(folder, num_specials=VOCAB_SIZE - 256)
    write_json(
        folder,
        "config.json",
        auto_map={"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"},
    )
    write_json(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.EvilTokenizer"]})
    return marker


def test_remote_code_is_not_executed(
    folder: Path, remote_code: Path, expected: Tokens, make_llm: Callable[..., LLM]
) -> None:
    """A known architecture runs on this project's code, whatever code the checkpoint brings."""
    assert generate(make_llm(folder)) == expected
    assert not remote_code.exists()


def test_unknown_model_with_remote_code_is_refused(folder: Path, remote_code: Path, refuse: Callable[..., str]) -> None:
    """An unknown one is refused, without a question to the terminal."""
    write_json(folder, "config.json", model_type="evil", architectures=["EvilModel"])
    refuse(folder, "EvilModel")
    assert not remote_code.exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "NewForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ...}, "architecture.*llama"),
        ({"architectures": None}, "architecture.*llama"),
        ({"architectures": []}, "architecture.*llama"),
        ({"architectures": ..., "model_type": ...}, "config.json|architecture|model_type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": "relu"}, "relu"),
    ],
)
def test_unsupported_is_refused_by_name(
    keys: dict[str, Any], message: str, folder: Path, refuse: Callable[..., str]
) -> None:
    """Never run wrong: what the config asks for and this decoder doesn't do is named."""
    write_json(folder, "config.json", **keys)
    refuse(folder, message)


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
def test_file_that_is_no_model(name: str, pristine: tuple[Path, Tokens], tmp_path: Path, refuse: Any) -> None:
    """A path to the weights themselves: the error says what is accepted."""
    path = tmp_path / name
    path.write_bytes(b"x")
    refuse(path, r"neither a directory nor a \.gguf file")


# Paths and hub ids


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Replaces the hub by one that can't be reached; gives the list of downloads tried."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(repo_id: str, **kwargs: Any) -> str:
        calls.append((repo_id, kwargs))
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing", "~/missing-model", "a/b/c", "missing.gguf", "x/y.gguf"]
)
def test_missing_path(model: str, hub: list[Any], refuse: Callable[..., str]) -> None:
    """A mistyped path is not looked up on the hub."""
    refuse(model, "no such file or directory", FileNotFoundError)
    assert hub == []


@pytest.mark.parametrize("model", ["someone/some-model", "gpt2", "Org_1/Model.v2-7B"])
def test_hub_out_of_reach(model: str, hub: list[Any], refuse: Callable[..., str]) -> None:
    """The error says that neither a directory nor the hub had it, and why."""
    refuse(model, "^MODEL: .*no network", FileNotFoundError)
    assert [repo_id for repo_id, _ in hub] == [model]


def test_hub_download(
    pristine: tuple[Path, Tokens], monkeypatch: pytest.MonkeyPatch, make_llm: Callable[..., LLM]
) -> None:
    """An id is fetched without pickles and code, and then read like a directory."""
    calls = []

    def download(repo_id: str, **kwargs: Any) -> str:
        calls.append((repo_id, kwargs["allow_patterns"]))
        return str(pristine[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert generate(make_llm("someone/some-model")) == pristine[1]
    ((repo_id, patterns),) = calls
    assert repo_id == "someone/some-model"
    for wanted in ("config.json", "model-00001-of-00002.safetensors", INDEX, "tokenizer.model"):
        assert any(Path(wanted).match(pattern) for pattern in patterns), wanted
    for unwanted in ("pytorch_model.bin", "modeling_evil.py", "model.pt", "consolidated.00.pth", "model.onnx"):
        assert not any(Path(unwanted).match(pattern) for pattern in patterns), unwanted


# Dtypes and older configs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_checkpoint_in_float32(dtype: torch.dtype, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """On a CPU the default is float32, whatever the checkpoint's dtype, with the checkpoint's exact values."""
    save_random_model(tmp_path).to(dtype).save_pretrained(tmp_path)
    expected = reference_tokens(load_reference(tmp_path))
    for settings in ({}, {"dtype": "float32"}):
        llm = make_llm(tmp_path, **settings)
        assert next(llm.runner.model.parameters()).dtype == torch.float32
        assert generate(llm) == expected


@pytest.mark.parametrize("dtype_key", ["torch_dtype", "dtype", None])
def test_config_of_transformers_4(dtype_key: str | None, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """A config as transformers 4 wrote it: torch_dtype, rope_theta at the top, no rope_parameters."""
    model = save_random_model(tmp_path, rope_theta=123.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 123.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }
    if dtype_key:
        config[dtype_key] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = reference_tokens(model)
    assert expected != reference_tokens(save_random_model(tmp_path / "other_theta"))
    assert generate(make_llm(tmp_path)) == expected


# Dummy weights


def test_dummy_weights_need_no_files(folder: Path, expected: Tokens, make_llm: Callable[..., LLM]) -> None:
    """Only the config is read; every engine gets the same weights, which are not the checkpoint's."""
    (folder / "model.safetensors").write_bytes(b"damaged")
    first = make_llm(folder, load_format="dummy")
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1234)
    second = make_llm(folder, load_format="dummy", seed=5)
    for (name, ours), theirs in zip(
        first.runner.model.named_parameters(), second.runner.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
        assert ours.isfinite().all(), name
    tokens = generate(first)
    assert tokens == generate(second)
    assert tokens != expected


# Vocabulary and end of sequence


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts: after token t comes t + 1, by a wide margin."""
    folder = tmp_path_factory.mktemp("counting")
    save_markov_model(folder, 30.0 * torch.eye(VOCAB_SIZE).roll(1, dims=1))
    return folder


def test_extra_ids_are_never_emitted(counting: Path, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """The config's vocabulary is padded to 320, the tokenizer knows 300 ids: no token without a text comes out, with
    or without sampling, even if the model wants one. Without a tokenizer there is no such limit."""
    folder = Path(shutil.copytree(counting, tmp_path / "model"))
    without = make_llm(folder)
    greedy = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    assert without.generate([[290]], greedy, use_tqdm=False)[0]["token_ids"] == list(range(291, 316))

    save_byte_tokenizer(folder, num_specials=300 - 256)
    llm = make_llm(folder)
    (output,) = llm.generate([[290]], greedy, use_tqdm=False)
    assert output["token_ids"][:9] == list(range(291, 300))
    assert max(output["token_ids"]) < 300
    hot = SamplingParams(temperature=2.0, max_tokens=100, ignore_eos=True, seed=1)
    outputs = llm.generate([[299]] * 4 + [[310]] * 4, hot, use_tqdm=False)
    assert all(token < 300 for output in outputs for token in output["token_ids"])


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ([5, 7], None, {5, 7}),
        (7, None, {7}),
        (None, 9, {9}),
        (None, [9, 11], {9, 11}),
        ([5, 7], 9, {5, 7, 9}),
        (..., 9, {9}),
        (None, None, set()),
    ],
)
@pytest.mark.parametrize("has_tokenizer", [False, True], ids=["", "tokenizer"])
def test_eos_is_the_union(
    generation: Any,
    config: Any,
    stops: set[int],
    has_tokenizer: bool,
    counting: Path,
    tmp_path: Path,
    make_llm: Callable[..., LLM],
) -> None:
    """Guards against an end-of-sequence token that one of three files names and the engine misses: chat models would
    run on. Each of them ends a sequence; `ignore_eos` runs over all."""
    folder = Path(shutil.copytree(counting, tmp_path / "model"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not ...:
        write_json(folder, "generation_config.json", eos_token_id=generation)
    write_json(folder, "config.json", eos_token_id=config)
    if has_tokenizer:
        save_byte_tokenizer(folder, num_specials=VOCAB_SIZE - 256)
        stops = stops | {257}
    llm = make_llm(folder)
    assert llm.eos_token_ids == frozenset(stops)
    params = SamplingParams(temperature=0, max_tokens=5)
    for stop in stops:
        (output,) = llm.generate([[stop - 2]], params, use_tqdm=False)
        assert output["finish_reason"] == "stop"
        assert (output["token_ids"][-1], output["stop_reason"]) == (stop, stop)
    (output,) = llm.generate([[3]], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), use_tqdm=False)
    assert output["token_ids"] == list(range(4, 14))


def test_without_tokenizer_prompts_are_ids(pristine: tuple[Path, Tokens], make_llm: Callable[..., LLM]) -> None:
    """Text needs a tokenizer: a clear error, and ids still work."""
    llm = make_llm(pristine[0])
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate(["hello"], GREEDY, use_tqdm=False)
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0]["text"] == ""
