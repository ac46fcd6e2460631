"""Small files that are replaced as a whole: the description of a job, its report, its metrics."""

import os
from contextlib import suppress
from pathlib import Path

from nanovllm.jobs.errors import JobError


def write_whole(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Replaces the file, or makes it: whoever reads it sees the old text or the new one.

    Args:
        is_durable: it survives a power failure; what is soon replaced again need not.

    Raises:
        JobError: it can't be written; the old one stays.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # where its folder is none any more, that can't be done either
            temporary.unlink()
        raise JobError(f"{path}: can't write it: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raises JobError if `write_whole` would now, or if it would replace something that is no file."""
    temporary = _temporary(path)
    try:
        if path.exists() and not path.is_file():
            raise JobError(f"{path}: is not a regular file")
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise JobError(f"{path}: can't write it: {error.strerror}") from error


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
