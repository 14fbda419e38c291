"""Files cut into chunks of records, without parsing them: cheap to cut and to send, so that the parsing can be shared.

Every reader streams: memory stays flat whatever the size of the file.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

_RECORDS = 256  # records of a chunk: less than a second of work
_BYTES = 1 << 20  # of a chunk; a longer record is a chunk of its own
_PIECE = 1 << 20  # characters of a JSON array read at once
_ZST_PIECE = 1 << 14  # compressed bytes taken at once; a thousandfold of it is still little memory
_LONGEST = 1 << 28  # characters of one element of a JSON array; what is longer counts as damaged
LINE_SUFFIXES = {".jsonl", ".ndjson", ".json"}
ARROW_SUFFIXES = {".arrow", ".feather", ".ipc"}


class Chunk(NamedTuple):
    """Some records of a file, in order. `kind` says what `data` is.

    "lines": bytes, a record a line; "values": a list of JSON texts; "table": bytes, an Arrow stream.
    """

    kind: str
    first: int  # number of the first record, counted from 1
    records: int  # of lines, blank ones included
    data: Any
    position: int  # bytes of the file read so far, for a progress bar
    fault: str = ""  # of a record behind the last one, which ends the file


def read_chunks(file: Path, option: str = "data.train", skip: int = 0) -> Iterator[Chunk]:
    """The records of one file in chunks, without the first `skip`.

    Raises ValueError naming the file when the file as a whole cannot be read (damaged archive, not Parquet, ...).
    """
    import pyarrow as pa

    try:
        if file.is_dir():
            yield from _dataset(file, skip)
        elif file.suffix == ".parquet":
            yield from _parquet(file, skip)
        elif file.suffix in ARROW_SUFFIXES:
            yield from _arrow(file, skip)
        else:
            with _open(file, option) as (stream, position):
                if suffix(file) == ".json" and (array := _is_array(stream)) is not None:
                    yield from _values(stream, position, skip, array)
                else:
                    yield from _lines(stream, position, skip)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise ValueError(f"{option}: cannot read {str(file)!r}: {error}") from error


def file_size(file: Path) -> int:
    """Bytes of a file, or of a folder's files."""
    return sum(part.stat().st_size for part in file.iterdir()) if file.is_dir() else file.stat().st_size


def suffix(file: Path) -> str:
    """The suffix that tells the format, that of a compression left out."""
    return Path(file.stem).suffix if file.suffix in {".gz", ".zst"} else file.suffix


@contextlib.contextmanager
def _open(file: Path, option: str) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """The file's content, decompressed, and a function that tells how many of its own bytes were read."""
    with file.open("rb") as raw:
        if file.suffix == ".gz":
            yield io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=raw))), raw.tell
        elif file.suffix == ".zst":
            yield io.BufferedReader(_zst(file, raw, option)), raw.tell
        else:
            yield raw, raw.tell


def _zst(file: Path, raw: BinaryIO, option: str) -> io.RawIOBase:
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"{option}: {str(file)!r} needs the package zstandard: pip install zstandard") from error

    class Source(io.RawIOBase):
        """One frame after the other. zstandard's own reader takes a file that breaks off inside a frame for a whole
        one; here that, like any other damage, is an OSError."""

        def __init__(self) -> None:
            self.frame: Any = None
            self.compressed = self.content = b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            while not self.content:
                self.compressed = self.compressed or raw.read(_ZST_PIECE)
                if not self.compressed:
                    if self.frame is not None:
                        raise OSError("the file breaks off inside a zstd frame")
                    return 0
                self.frame = self.frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    self.content = self.frame.decompress(self.compressed)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                self.compressed = self.frame.unused_data if self.frame.eof else b""
                self.frame = None if self.frame.eof else self.frame
            size = min(len(buffer), len(self.content))
            buffer[:size], self.content = self.content[:size], self.content[size:]
            return size

    return Source()


def _lines(stream: BinaryIO, position: Callable[[], int], skip: int) -> Iterator[Chunk]:
    lines: list[bytes] = []
    size = number = 0
    for number, line in enumerate(stream, 1):
        if number <= skip:
            continue
        lines.append(line)
        size += len(line)
        if size >= _BYTES or len(lines) >= _RECORDS:
            yield Chunk("lines", number - len(lines) + 1, len(lines), b"".join(lines), position())
            lines, size = [], 0
    if lines:
        yield Chunk("lines", number - len(lines) + 1, len(lines), b"".join(lines), position())


def _is_array(stream: io.BufferedReader) -> bool | None:
    """Whether the file is one array; None where it holds a record a line, False for records spread over lines."""
    start = stream.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"[":
        return True
    line, ended, _ = start.partition(b"\n")
    if line[:1] == b"{" and ended:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            return None
        return False
    return None


def _values(stream: BinaryIO, position: Callable[[], int], skip: int, array: bool) -> Iterator[Chunk]:
    # Kept here: the wrapper closes the stream when it goes, and the position is asked for after that.
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
    values: list[str] = []
    size = number = 0
    fault = ""
    for value in _elements(reader, array):
        if isinstance(value, _Damage):
            fault = str(value)
            break
        number += 1
        if number <= skip:
            continue
        values.append(value)
        size += len(value)
        if size >= _BYTES or len(values) >= _RECORDS:
            yield Chunk("values", number - len(values) + 1, len(values), values, position())
            values, size = [], 0
    if values or fault:
        yield Chunk("values", number - len(values) + 1, len(values), values, position(), fault)


class _Damage(str):
    """Why the rest of an array cannot be read."""


def _elements(reader: io.TextIOWrapper, array: bool) -> Iterator[str]:
    """The texts of JSON values, in an array or one after the other.

    A damaged one ends the file: nothing tells where the next one starts.
    """
    decoder = json.JSONDecoder()
    buffer, position, ended = reader.read(_PIECE).lstrip(), int(array), False
    while True:
        while position < len(buffer) and buffer[position] in " \t\r\n,":
            position += 1
        if position < len(buffer) and buffer[position] == "]" and array:
            return
        if position == len(buffer) and ended and not array:
            return
        try:
            _, end = decoder.raw_decode(buffer, position)
            # A value that touches the end of the buffer may go on in the next piece.
            complete = ended or buffer[end:].lstrip() != ""
        except RecursionError:
            yield _Damage("not JSON")
            return
        except ValueError:
            end, complete = position, False
        if complete:
            yield buffer[position:end]
            position = end
            continue
        if ended or len(buffer) - position > _LONGEST:
            yield _Damage("not JSON: the file breaks off or is damaged here")
            return
        # Doubling keeps a value longer than the piece linear in its length.
        more = reader.read(max(_PIECE, len(buffer) - position))
        ended = not more
        buffer, position = buffer[position:] + more, 0


def _parquet(file: Path, skip: int) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        total = parquet.metadata.num_rows
        yield from _tables(parquet.iter_batches(batch_size=_RECORDS), skip, file_size(file), total)


def _arrow(file: Path, skip: int) -> Iterator[Chunk]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        yield from _tables(batches, skip, source.tell)


def _dataset(folder: Path, skip: int) -> Iterator[Chunk]:
    import datasets

    dataset = datasets.load_from_disk(str(folder))
    assert isinstance(dataset, datasets.Dataset)  # a DatasetDict was refused by resolve_files
    tables = dataset.with_format("arrow").iter(batch_size=1000)
    batches = (batch for table in tables for batch in cast(Any, table).to_batches())
    yield from _tables(batches, skip, file_size(folder), len(dataset))


def _tables(batches: Iterator[Any], skip: int, size: int | Callable[[], int], total: int = 0) -> Iterator[Chunk]:
    """`size`: bytes of the file with `total` rows, or a function that tells how many were read."""
    import pyarrow as pa

    number = 0
    for batch in batches:
        number += batch.num_rows
        if batch.num_rows == 0 or number <= skip:
            continue
        start = max(0, skip - (number - batch.num_rows))
        # By the batch's mean: rows that are much longer than the others may make a chunk larger.
        step = max(1, min(_RECORDS, _BYTES * batch.num_rows // max(batch.nbytes, 1)))
        while start < batch.num_rows:
            piece = batch.slice(start, step)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, piece.schema) as writer:
                writer.write_batch(piece)
            first = number - batch.num_rows + start + 1
            read = size() if callable(size) else size * (first + piece.num_rows - 1) // max(total, 1)
            yield Chunk("table", first, piece.num_rows, sink.getvalue().to_pybytes(), read)
            start += step
