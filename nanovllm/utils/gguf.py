"""GGUF files of a Llama or Qwen architecture, dequantised while they are read."""

import re
from collections.abc import Iterator
from pathlib import Path
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
# Rows are dequantised so many elements at a time, which bounds the float32 scratch.
_CHUNK_ELEMENTS = 4 << 20


class GGUFCheckpoint(Checkpoint):
    """One `.gguf` file: config, tokenizer and tensors in one. Needs the package `gguf`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError(f"{path}: reading GGUF needs `pip install nanovllm[gguf]`") from error
        try:
            self._reader = GGUFReader(path)
            architecture = self._reader.fields["general.architecture"].contents()
        except Exception as error:
            raise ValueError(f"{path}: not a GGUF file, or a damaged one: {error}") from error
        if architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise ValueError(f"{path}: GGUF architecture {architecture!r} is not supported (supported: {supported})")
        from transformers import AutoConfig

        self.config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        self.config.architectures = [_ARCHITECTURES[architecture]]
        self._is_permuted = architecture == "llama"

    def load_tokenizer(self) -> Any | None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        for tensor in self._reader.tensors:
            name = _transformers_name(tensor.name)
            num_heads = 0
            if self._is_permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
                is_query = name.endswith("q_proj.weight")
                num_heads = self.config.num_attention_heads if is_query else self.config.num_key_value_heads
            yield name, _GGUFSource(tensor, num_heads)


class _GGUFSource:
    """A tensor, possibly with the rows of each head in interleaved order.

    GGUF's Llama rotates dimensions (2i, 2i + 1) of a head together where transformers rotates (i, i + D/2), so
    the converter to GGUF has moved row i + j * D/2 of each head's D rows to 2i + j.
    """

    def __init__(self, tensor: Any, num_interleaved_heads: int) -> None:
        self._tensor, self._num_interleaved_heads = tensor, num_interleaved_heads
        self.shape = tuple(int(size) for size in reversed(tensor.shape))

    def copy_to(self, target: torch.Tensor) -> None:
        from gguf.quants import dequantize

        rows, tensor_type = self._tensor.data, self._tensor.tensor_type
        if self._num_interleaved_heads:
            target = target.unflatten(0, (self._num_interleaved_heads, 2, -1)).transpose(1, 2)
            target.copy_(torch.tensor(dequantize(rows, tensor_type)).view(target.shape))
            return
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // self.shape[-1]) if len(self.shape) > 1 else len(rows)
        for start in range(0, len(rows), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            target[chunk].copy_(torch.tensor(dequantize(rows[chunk], tensor_type)))


def _transformers_name(name: str) -> str:
    """The transformers name of a GGUF tensor; an unknown name is returned unchanged, for the loader to report."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP_LEVEL_NAMES[part]}.{kind}" if part in _TOP_LEVEL_NAMES else name
