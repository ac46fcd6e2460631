"""GGUF files of a Llama or Qwen architecture, dequantised while they are read."""

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.utils.checkpoint import Checkpoint, TensorSource

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Name in a transformers config -> key of the metadata, after the architecture's name.
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
# Rows are dequantised so many elements at a time, which bounds the float32 scratch.
_CHUNK_ELEMENTS = 4 << 20
_OLDEST_TRANSFORMERS = (5, 18)


class GGUFCheckpoint(Checkpoint):
    """One `.gguf` file: config, tokenizer and tensors in one. Needs the package `gguf`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = self.location = str(path)
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError(f"{path}: reading GGUF needs `pip install gguf`") from error
        try:
            self._reader = GGUFReader(path)
            architecture = self._reader.fields["general.architecture"].contents()
        except Exception as error:
            raise ValueError(f"{path}: not a GGUF file, or a damaged one: {error}") from error
        if architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise ValueError(f"{path}: GGUF architecture {architecture!r} is not supported (supported: {supported})")
        self._shapes = {tensor.name: _shape(tensor) for tensor in self._reader.tensors}
        self.config = self._make_config(architecture)
        self._is_permuted = architecture == "llama"

    def load_tokenizer(self) -> Any | None:
        if self._metadata("tokenizer.ggml.model") is None:
            return None
        from transformers import AutoTokenizer, __version__

        # An older one adds tokens to texts, or ends them at another, without a word.
        if tuple(map(int, __version__.split(".")[:2])) < _OLDEST_TRANSFORMERS:
            oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
            raise ImportError(
                f"{self.path}: tokenizers of GGUF files need transformers {oldest} or newer, this is {__version__}"
            )
        try:
            return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except Exception as error:
            raise ValueError(f"{self.path}: its tokenizer can't be read: {error}") from error

    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        for tensor in self._reader.tensors:
            name = _transformers_name(tensor.name)
            num_heads = 0
            if self._is_permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
                is_query = name.endswith("q_proj.weight")
                num_heads = self.config.num_attention_heads if is_query else self.config.num_key_value_heads
            yield name, _GGUFSource(tensor, num_heads)
            # What has been read would else count as this process's memory until the file is closed.
            self._reader.data._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def _make_config(self, architecture: str) -> SimpleNamespace:
        """The file's metadata under the names of a transformers config."""

        def get(key: str, default: Any = None) -> Any:
            value = self._metadata(f"{architecture}.{key}")
            return default if value is None else value

        values = {name: get(key) for name, key in _CONFIG_KEYS.items()}
        if missing := sorted(_CONFIG_KEYS[name] for name, value in values.items() if value is None):
            raise ValueError(f"{self.path}: its metadata lack {architecture}.{missing[0]}")
        if not all(isinstance(values[name], int) for name in values if name != "rms_norm_eps"):
            raise ValueError(f"{self.path}: layers of different sizes are not supported")
        if (scaling := get("rope.scaling.type", "none")) != "none":
            raise ValueError(f"{self.path}: rope scaling {scaling!r} is not supported in a GGUF file")
        head_dim = get("attention.key_length", values["hidden_size"] // values["num_attention_heads"])
        if (rotated := get("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"{self.path}: partial rotary embedding ({rotated} of {head_dim}) is not supported")
        ends = [self._metadata(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return SimpleNamespace(
            **values,
            architectures=[_ARCHITECTURES[architecture]],
            model_type=architecture,
            head_dim=head_dim,
            num_key_value_heads=get("attention.head_count_kv", values["num_attention_heads"]),
            vocab_size=self._shapes.get("token_embd.weight", (0,))[0],
            rope_theta=get("rope.freq_base", 10000.0),
            use_sliding_window=True,
            sliding_window=get("attention.sliding_window"),
            tie_word_embeddings="output.weight" not in self._shapes,
            eos_token_id=[token_id for token_id in ends if token_id is not None],
        )

    def _metadata(self, key: str) -> Any | None:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()


class _GGUFSource:
    """A tensor, possibly with the rows of each head in interleaved order.

    GGUF's Llama rotates dimensions (2i, 2i + 1) of a head together where transformers rotates (i, i + D/2), so
    the converter to GGUF has moved row i + j * D/2 of each head's D rows to 2i + j.
    """

    def __init__(self, tensor: Any, num_interleaved_heads: int) -> None:
        self._tensor, self._num_interleaved_heads = tensor, num_interleaved_heads
        self.shape = _shape(tensor)

    def copy_to(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        from gguf.quants import dequantize

        rows, tensor_type = self._tensor.data[part[:1]], self._tensor.tensor_type
        columns = part[1] if len(part) > 1 else slice(None)  # rows are dequantised whole
        if self._num_interleaved_heads:
            num_heads = self._num_interleaved_heads * len(rows) // self.shape[0]
            target = target.unflatten(0, (num_heads, 2, -1)).transpose(1, 2)
            target.copy_(torch.tensor(dequantize(rows, tensor_type)).view(target.shape))
            return
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // self.shape[-1]) if len(self.shape) > 1 else len(rows)
        for start in range(0, len(rows), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            values = dequantize(rows[chunk], tensor_type)
            target[chunk].copy_(torch.tensor(values[..., columns] if values.ndim > 1 else values))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts dimensions from the innermost


def _transformers_name(name: str) -> str:
    """The transformers name of a GGUF tensor; an unknown name is returned unchanged, for the loader to report."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP_LEVEL_NAMES[part]}.{kind}" if part in _TOP_LEVEL_NAMES else name
