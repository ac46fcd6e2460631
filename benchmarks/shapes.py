"""Checkpoint folders without weights, for `load_format="dummy"`: throughput doesn't depend on the values."""

import itertools
import json
import tempfile
from pathlib import Path

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "eos_token_id": 151645,
}
SHAPES = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def shape_folder(name: str) -> Path:
    """A new temporary folder with the config of a shape."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def save_tokenizer(folder: Path) -> None:
    """Adds a byte-level tokenizer that knows all of the config's ids but the last few: bytes, then made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    num_ids = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = "etaoinshrdlucmfwypvbgk"
    words = ("Ġ" + "".join(word) for word in itertools.product(letters, repeat=4))
    tokens = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in zip(range(num_ids), tokens, strict=False)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
