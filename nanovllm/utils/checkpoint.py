"""Where a model comes from: a directory, a hub id, or a GGUF file. Nothing in a checkpoint is ever executed."""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

# Files of a hub repository that are worth fetching.
_HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Mapped pages of a file count as this process's memory until the file is closed: reopened after so many bytes.
_REOPEN_AFTER_BYTES = 64 << 20


class TensorSource(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    shape: tuple[int, ...]

    def copy_to(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """Reads the tensor, or the `part` of it that these slices of its first dimensions cut out, into `target`, of
        the same shape and any float dtype and device."""


class Checkpoint(ABC):
    """A model's config, tokenizer and tensors.

    Attributes:
        config: the model's configuration, an attribute for each key of a transformers `config.json`.
        name: for messages.
        location: what `open_checkpoint` finds it by, without asking a hub.
    """

    config: Any
    name: str
    location: str

    @abstractmethod
    def load_tokenizer(self) -> Any | None:
        """The transformers tokenizer, or None if the checkpoint has none."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        """Name and source of each tensor, under the names of a transformers checkpoint. A source is valid until
        the next one is asked for."""

    def generation_config(self) -> dict[str, Any]:
        """Content of `generation_config.json`; empty if there is none."""
        return {}

    def eos_token_ids(self, tokenizer: Any | None) -> frozenset[int]:
        """End-of-sequence tokens: those of the generation config, the model config and the tokenizer."""
        found: set[int] = set()
        tokenizer_eos = getattr(tokenizer, "eos_token_id", None)
        model_eos = getattr(self.config, "eos_token_id", None)
        for ids in (self.generation_config().get("eos_token_id"), model_eos, tokenizer_eos):
            found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
        return frozenset(found)


def open_checkpoint(model: str, with_weights: bool = True) -> Checkpoint:
    """Finds a model.

    Args:
        model: a local directory, a `.gguf` file, or a Hugging Face id (fetched unless it is cached).
        with_weights: whether a hub's weights are wanted, too.

    Raises:
        FileNotFoundError: a path that doesn't exist.
        ValueError: something that is not a model, or one that is not supported.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return DirectoryCheckpoint(path)
    if path.is_file():
        if path.suffix == ".gguf":
            from nanovllm.utils.gguf import GGUFCheckpoint

            return GGUFCheckpoint(path)
        raise ValueError(f"{model}: neither a directory nor a .gguf file")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model) or model.endswith(".gguf"):
        raise FileNotFoundError(f"{model}: no such file or directory")
    from huggingface_hub import snapshot_download

    # Some repositories hold the same weights twice; nobody reads the second copy.
    ignored = ["consolidated*", "original/*"] if with_weights else ["*.safetensors"]
    try:
        folder = snapshot_download(model, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=ignored)
    except Exception as error:
        raise FileNotFoundError(f"{model}: no such directory, and not to be had from the hub: {error}") from error
    return DirectoryCheckpoint(Path(folder), name=model)


class DirectoryCheckpoint(Checkpoint):
    """A folder with `config.json`, safetensors files and, usually, a tokenizer."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or str(folder)
        self.location = str(folder)
        config = self._read_json("config.json")
        if config is None:
            raise ValueError(f"{self.name}: not a model directory, it has no config.json")
        # Read here, not by transformers: what is needed of it is little, and importing its models takes seconds.
        self.config = SimpleNamespace(**config)

    def load_tokenizer(self) -> Any | None:
        if not any((self.folder / name).exists() for name in _TOKENIZER_FILES):
            logger.warning("%s has no tokenizer: prompts must be token ids, and there will be no text", self.name)
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:
            raise ValueError(f"{self.name}: its tokenizer can't be read: {error}") from error

    def generation_config(self) -> dict[str, Any]:
        return self._read_json("generation_config.json") or {}

    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        for path, names in self._files().items():
            yield from _read_safetensors(path, names)

    def _files(self) -> dict[Path, list[str] | None]:
        """Files to read, each with the tensors to take from it (None: all of them)."""
        index = self._read_json("model.safetensors.index.json")
        if index is not None:
            files: dict[Path, list[str] | None] = {}
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{self.name}: model.safetensors.index.json has no weight_map")
            for tensor_name, file_name in weight_map.items():
                if not isinstance(file_name, str):
                    raise ValueError(f"{self.name}: model.safetensors.index.json: weight_map names {file_name!r}")
                path = self.folder / Path(file_name).name  # an index can't point outside the folder
                files.setdefault(path, []).append(tensor_name)  # type: ignore[union-attr]
        else:
            paths = sorted(self.folder.glob("*.safetensors"))
            single = self.folder / "model.safetensors"
            files = dict.fromkeys([single] if single in paths else paths)
        if not files:
            pickled = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            reason = f"only pickled ones ({', '.join(pickled)}), which are not read" if pickled else "none"
            raise ValueError(f"{self.name}: needs weights as *.safetensors, but has {reason}")
        for path in files:
            if not path.is_file():
                raise ValueError(f"{self.name}: {path.name} is named in the index but missing")
        return files

    def _read_json(self, file_name: str) -> dict[str, Any] | None:
        path = self.folder / file_name
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.name}: {file_name} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.name}: {file_name} is not a JSON object")
        return content


class _SafetensorsSource:
    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        part = file.get_slice(name)
        self.shape, self._dtype = tuple(part.get_shape()), part.get_dtype()

    def copy_to(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        if self._dtype not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{self._name} holds {self._dtype} values: quantized checkpoints are not supported")
        target.copy_(self._file.get_slice(self._name)[part] if part else self._file.get_tensor(self._name))


def _read_safetensors(path: Path, names: list[str] | None) -> Iterator[tuple[str, TensorSource]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            in_file = list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file, or a damaged one: {error}") from error
    wanted = in_file if names is None else names
    if absent := set(wanted) - set(in_file):
        raise ValueError(f"{path}: lacks {sorted(absent)[0]!r}, which the index says it holds")
    remaining = iter(wanted)
    name = next(remaining, None)
    while name is not None:
        with safe_open(path, framework="pt") as file:
            num_bytes = 0
            while name is not None and num_bytes < _REOPEN_AFTER_BYTES:
                source = _SafetensorsSource(file, name)
                yield name, source
                num_bytes += 4 * int(torch.tensor(source.shape).prod())
                name = next(remaining, None)
