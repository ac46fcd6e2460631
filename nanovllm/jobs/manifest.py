"""What a job is, in a small file beside its results: a resumed job has to be the same one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.files import write_whole

_CHUNK_BYTES = 1 << 20
# Of a model's file as large as weights are, so many bytes are read at the beginning, the middle and the end.
_SAMPLE_BYTES = 1 << 16
_WHOLE_FILE_BYTES = 64 << 20


class Manifest:
    """The settings that results depend on (`job`), and others of which a difference is only worth a warning
    (`engine`). Both are JSON objects."""

    def __init__(self, job: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        self.job = json.loads(json.dumps(job))
        self.engine = json.loads(json.dumps(engine))

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """None if there is no such file. Raises JobError if it isn't what `write` wrote."""
        try:
            content = json.loads(path.read_text())
            return cls(content["job"], content["engine"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise JobError(f"{path}: not the description of a job: {error}") from error

    def write(self, path: Path) -> None:
        """As `write_whole`."""
        write_whole(path, json.dumps({"job": self.job, "engine": self.engine}, indent=2))


def manifest_path(output: str) -> Path:
    return Path(output + ".job")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two objects, as `name was 1, is 2`."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {json.dumps(old.get(name)):.80}, is {json.dumps(new.get(name)):.80}" for name in names]


def fingerprint_file(path: Path) -> str:
    """Size and hash of a file's whole content."""
    digest = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return f"{num_bytes}-{digest.hexdigest()}"


def fingerprint_model(location: Path) -> str:
    """A hash of names and sizes of a model's files, and of their contents, of large ones in samples. It doesn't depend
    on where the model is."""
    digest = xxhash.xxh3_128()
    paths = sorted(path for path in location.iterdir() if path.is_file()) if location.is_dir() else [location]
    for path in paths:
        if location.is_dir():
            digest.update(path.name.encode() + b"\0")
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for start in (0, size // 2, size - _SAMPLE_BYTES):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
