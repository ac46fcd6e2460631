"""The output file: whole lines only, each row once, whatever happens to the process."""

import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.jobs.errors import JobError

_SECONDS_BETWEEN_SYNCS = 30.0
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)


class RowSet:
    """Indices of rows, one bit each."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._bits = bytearray(num_rows // 8 + 1)
        self._num = 0

    def add(self, index: int) -> None:
        self._num += index not in self
        self._bits[index >> 3] |= 1 << (index & 7)

    def __contains__(self, index: int) -> bool:
        return bool(self._bits[index >> 3] >> (index & 7) & 1)

    def __len__(self) -> int:
        return self._num


@dataclass(frozen=True)
class Done:
    """What an output file holds already."""

    rows: RowSet
    num_failed: int


class ResultFile:
    """Appends records as JSON lines. One process at a time has a file (an advisory lock that ends with it).

    Attributes:
        is_resumable: whether it is a file, and not a pipe or a device.
    """

    def __init__(self, fd: int, name: str) -> None:
        """Takes an open descriptor. Raises JobError if another process writes to the file."""
        self._fd, self._name = fd, name
        status = os.fstat(fd)
        self.is_resumable = stat.S_ISREG(status.st_mode)
        self._size = status.st_size
        self._last_sync = time.monotonic()
        if self.is_resumable:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise JobError(f"{name}: another process is writing to it") from None

    @property
    def is_empty(self) -> bool:
        return self._size == 0

    @classmethod
    def open(cls, path: str) -> "ResultFile":
        """A file, made if it isn't there; a device or pipe; or standard output, for `-`."""
        if path == "-":
            fd = os.dup(1)
            os.dup2(2, 1)  # nothing that a library prints may come between the lines
            return cls(fd, "standard output")
        try:
            flags = os.O_WRONLY if is_stream(path) else os.O_RDWR | os.O_APPEND | os.O_CREAT
            return cls(os.open(path, flags, 0o666), path)
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}") from error

    def take_over(
        self, num_rows: int, index_of: Callable[[Any], int | None], is_failure: Callable[[Any], bool]
    ) -> Done:
        """What the file holds. A last line that was cut off is removed.

        Raises:
            JobError: a line, other than such a last one, is not a result of this job, or repeats a row.
        """
        rows, num_failed, end, number, bad_line = RowSet(num_rows), 0, 0, 0, 0
        with Path(self._name).open("rb") as file:
            for number, line in enumerate(file, 1):
                record = _record(line)
                index = None if record is None else index_of(record)
                if index is None or not 0 <= index < num_rows:
                    bad_line = bad_line or number
                    continue
                if bad_line:
                    raise JobError(
                        f"{self._name}:{bad_line}: not a result of this job, but one follows in line {number}"
                    )
                if index in rows:
                    raise JobError(f"{self._name}:{number}: row {index} is there twice")
                rows.add(index)
                num_failed += is_failure(record)
                end += len(line)
        if bad_line and _looks_foreign(self._name, end):
            raise JobError(f"{self._name}:{bad_line}: not a result of this job")
        self._truncate(end)
        return Done(rows, num_failed)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes the records, a line each, or nothing.

        Raises:
            JobError: they can't be written. The file ends with the last whole line from before.
        """
        data = b"".join(map(to_line, records))
        if not data:
            return
        try:
            _write(self._fd, data)
            self._size += len(data)
            if time.monotonic() - self._last_sync > _SECONDS_BETWEEN_SYNCS:
                self.sync()
        except OSError as error:
            self._truncate(self._size)
            raise JobError(self._why_not(error)) from error

    def sync(self) -> None:
        """What is written survives a power failure from now on."""
        if self.is_resumable:
            os.fsync(self._fd)
        self._last_sync = time.monotonic()

    def close(self) -> None:
        """Raises JobError if the last lines can't be stored."""
        try:
            self.sync()
        except OSError as error:
            raise JobError(self._why_not(error)) from error
        finally:
            os.close(self._fd)

    def _truncate(self, size: int) -> None:
        if self.is_resumable:
            os.ftruncate(self._fd, size)
            self._size = size

    def _why_not(self, error: OSError) -> str:
        if error.errno == errno.EPIPE:
            return f"{self._name}: nobody reads it any more ({error.strerror})"
        hint = "; --resume goes on with what is there" if self.is_resumable else ""
        return f"{self._name}: can't write results: {error.strerror}{hint}"


def is_stream(path: str) -> bool:
    """Whether it is standard output, or something there that is no regular file: it can't be resumed."""
    return path == "-" or (os.path.exists(path) and not os.path.isfile(path))


def to_line(record: Mapping[str, Any]) -> bytes:
    """The record as a line of JSON. What has no such form, as a date of a Parquet file, becomes a string; numbers that
    aren't finite become null."""
    try:
        text = _ENCODER.encode(record)
    except ValueError:
        text = json.dumps(_without_nan(record), ensure_ascii=False, default=str)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which JSON's escapes can hold
        return json.dumps(json.loads(text)).encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record(line: bytes) -> dict[str, Any] | None:
    """The object in a whole line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _looks_foreign(path: str, start: int) -> bool:
    """Whether what follows the last result holds a whole JSON object, as nothing does that was cut off."""
    with Path(path).open("rb") as file:
        file.seek(start)
        return any(_record(line) is not None for line in file)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
