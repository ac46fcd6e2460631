"""Rows of an input file, one after the other: JSON lines, text lines or Parquet, compressed or not."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from nanovllm.jobs.errors import JobError, RowError

FORMATS = ("auto", "jsonl", "openai", "text", "parquet")
_FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSED = (".gz", ".zst")
# So many lines are looked at for the first that tells OpenAI's batch format from other JSON lines.
_NUM_LINES_TO_DETECT = 100
_ROWS_OF_A_PARQUET_BATCH = 256
_ZSTANDARD_CHUNK_BYTES = 4096  # few, since they may become a thousand times as many

IsDone = Callable[[int], bool]


@dataclass(frozen=True)
class Row:
    """A row of the input.

    Attributes:
        index: 0-based, among the rows.
        line: 1-based, in the file; of Parquet, the number of the row.
        data: what it holds; empty if it can't be read.
        error: why it can't be read.
    """

    index: int
    line: int
    data: dict[str, Any]
    error: RowError | None = None


class InputFile:
    """A file of rows, which is read as often as asked for, and never held.

    Attributes:
        path: of the file.
        format: one of `FORMATS`, but never "auto".
    """

    def __init__(self, path: str, format: str = "auto", text_column: str = "prompt") -> None:
        """
        Args:
            format: "auto" goes by the file's name, and by its first lines.
            text_column: the column that a line of text becomes.

        Raises:
            JobError: the file can't be read, or is of no known format.
        """
        self.path = Path(path)
        self._text_column = text_column
        if not self.path.is_file():
            raise JobError(f"{path}: no such file" if not self.path.exists() else f"{path}: is not a regular file")
        self.format = _format_of_name(self.path) if format == "auto" else format
        if format == "auto" and self.format == "jsonl" and self._is_openai():
            self.format = "openai"
        if self.path.suffix.lower() == ".json" and self.format == "jsonl":
            self._refuse_document()

    def num_rows(self) -> int:
        """Counts the rows. Raises JobError if the file is damaged."""
        with self._readable():
            if self.format == "parquet":
                return int(_parquet_file(self.path).metadata.num_rows)
            return sum(1 for _ in self._lines())

    def rows(self, is_done: IsDone = lambda index: False) -> Iterator[Row]:
        """The rows in order, save those that are done already. Raises JobError if the file is damaged."""
        with self._readable():
            yield from self._parquet_rows(is_done) if self.format == "parquet" else self._line_rows(is_done)

    def _line_rows(self, is_done: IsDone) -> Iterator[Row]:
        parse = self._parse_text if self.format == "text" else parse_json
        for index, (number, line) in enumerate(self._lines()):
            if is_done(index):
                continue
            try:
                yield Row(index, number, parse(line))
            except RowError as error:
                yield Row(index, number, {}, error)

    def _parquet_rows(self, is_done: IsDone) -> Iterator[Row]:
        index, batches = 0, _parquet_file(self.path).iter_batches(batch_size=_ROWS_OF_A_PARQUET_BATCH)
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            except (OSError, ValueError, TypeError) as error:  # as those of Arrow are, too
                raise JobError(f"{self.path}: damaged after row {index}: {error}") from error
            if batch is None:
                return
            for data in rows:
                if not is_done(index):
                    yield Row(index, index + 1, data)
                index += 1

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and contents of the lines that are rows: of JSON lines, those that aren't blank."""
        number = 0
        with _open(self.path) as file:
            try:
                for number, line in enumerate(file, 1):
                    if self.format == "text" or not line.isspace():
                        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise JobError(f"{self.path}: damaged or cut off after line {number}: {error}") from error

    def _parse_text(self, line: bytes) -> dict[str, Any]:
        return {self._text_column: _decode(line).rstrip("\r\n")}

    def _is_openai(self) -> bool:
        with self._readable():
            for _, line in islice(self._lines(), _NUM_LINES_TO_DETECT):
                try:
                    return {"custom_id", "url", "body"} <= parse_json(line).keys()
                except RowError:
                    continue
        return False

    def _refuse_document(self) -> None:
        """Raises JobError if a `.json` file begins as one JSON document over many lines, or as a list."""
        with self._readable():
            first = next((line for _, line in self._lines()), b"{}")
        try:
            parse_json(first)
        except RowError as error:
            hint = "jq -c '.[]' writes a list so"
            raise JobError(f"{self.path}:1: {error.reason}; JSON lines are an object in each line ({hint})") from error

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """A file that can't be read ends the job, in one line."""
        try:
            yield
        except OSError as error:
            raise JobError(f"{self.path}: {error.strerror or error}") from error


def parse_json(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises RowError."""
    try:
        data = _DECODER.decode(_decode(line))
    except ValueError as error:
        raise RowError(None, f"not valid JSON: {error}") from error
    except RecursionError:
        raise RowError(None, "not readable JSON: nested too deeply") from None
    if not isinstance(data, dict):
        raise RowError(None, f"must be a JSON object, got {data!r:.80}")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # to make one takes longer than to decode a row


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError(None, f"not valid UTF-8 at byte {error.start + 1} of the line") from error


def _format_of_name(path: Path) -> str:
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    format = _FORMAT_OF_SUFFIX.get(name.suffix.lower())
    if format is None:
        raise JobError(f"{path}: its name doesn't say what it holds: pass --format {' or '.join(FORMATS[1:])}")
    return format


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(path))
    if path.suffix.lower() == ".zst":
        return _open_zstandard(path)
    return path.open("rb")


def _open_zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise JobError(f"{path}: a .zst file needs the package zstandard: pip install zstandard") from None
    return io.BufferedReader(_ZstandardReader(path.open("rb"), zstandard))


class _ZstandardReader(io.RawIOBase):
    """The content of all frames of a file. The library's own reader takes a file that is cut off for one that ends.

    Raises, while it is read, EOFError for such a file, and zlib.error, as of gzip, for one that is damaged.
    """

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        """`zstandard` is the package."""
        self._file, self._zstandard = file, zstandard
        self._frame: Any | None = None  # the decompressor of the one that has begun
        self._compressed, self._content = b"", memoryview(b"")  # what is left of each

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._file.read(_ZSTANDARD_CHUNK_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end of its last frame")
                return 0
            self._decompress()
        part, self._content = self._content[: len(buffer)], self._content[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._content = memoryview(self._frame.decompress(self._compressed))
        except self._zstandard.ZstdError as error:
            raise zlib.error(str(error)) from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None


def _parquet_file(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise JobError(f"{path}: a Parquet file needs the package pyarrow: pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise JobError(f"{path}: not a Parquet file, or a damaged one: {error}") from error
