"""Records from files: JSONL (plain, .gz, .zst), JSON arrays, Parquet, Arrow files and `datasets` folders.

Every reader streams: memory stays flat whatever the size of the file.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

_CHUNK = 1 << 20  # characters of a JSON array read at once
_LONGEST = 1 << 28  # characters of one element of a JSON array; what is longer counts as damaged
_BATCH = 1000  # rows of a columnar file held at once
_LINE_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_ARROW_SUFFIXES = {".arrow", ".feather", ".ipc"}
_KINDS = ".jsonl, .json (each also .gz or .zst), .parquet, .arrow, or a folder written by datasets.save_to_disk"


class Record(NamedTuple):
    """One record of a file; `value` is None and `fault` says why when it is not a JSON object."""

    source: str  # "file:line", counted from 1
    value: dict[str, Any] | None
    fault: str = ""


def resolve_files(paths: str | Path | Sequence[str | Path], option: str = "data.train") -> list[Path]:
    """The files behind paths and globs, in the order given.

    Raises FileNotFoundError for a path or glob with nothing behind it, ValueError for an empty file or a kind of file
    that no reader knows; both name the option.
    """
    entries = [paths] if isinstance(paths, str | Path) else list(paths)
    if not entries:
        raise ValueError(f"{option} is empty; give at least one file ({_KINDS})")
    files: list[Path] = []
    for entry in entries:
        path = Path(entry).expanduser()
        found = [path] if path.exists() else _matches(str(path))
        if not found:
            what = "no file matches" if glob.has_magic(str(path)) else "there is no file"
            raise FileNotFoundError(f"{option}: {what} {str(entry)!r}")
        files += [file for file in found if file not in files]
    for file in files:
        _check_file(file, option)
    return files


def _matches(pattern: str) -> list[Path]:
    # Path.glob takes no absolute pattern.
    return [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207


def _check_file(file: Path, option: str) -> None:
    if file.is_dir():
        if (file / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(p.name for p in file.iterdir() if p.is_dir()))
            raise ValueError(f"{option}: {str(file)!r} holds several splits ({splits}); give the folder of one of them")
        if not (file / "state.json").is_file():
            raise ValueError(f"{option}: folder {str(file)!r} was not written by datasets.save_to_disk; use a glob?")
        return
    if _suffix(file) not in {*_LINE_SUFFIXES, *_ARROW_SUFFIXES, ".parquet"}:
        raise ValueError(f"{option}: cannot tell what {str(file)!r} is by its name; expected {_KINDS}")
    if file.stat().st_size == 0:
        raise ValueError(f"{option}: file {str(file)!r} is empty")


def read_records(file: Path, option: str = "data.train", name: str | None = None) -> Iterator[Record]:
    """Every record of one file, bad ones included; `name` stands for the file in the records' sources.

    Raises ValueError naming the file when the file as a whole cannot be read (damaged archive, not Parquet, ...).
    """
    import pyarrow as pa

    name = name or file.name
    try:
        if file.is_dir():
            yield from _read_dataset(file, name)
        elif file.suffix == ".parquet":
            yield from _read_parquet(file, name)
        elif file.suffix in _ARROW_SUFFIXES:
            yield from _read_arrow(file, name)
        else:
            with _open(file, option) as stream:
                if _suffix(file) == ".json" and _starts_array(stream):
                    yield from _read_array(stream, name)
                else:
                    yield from _read_lines(stream, name)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise ValueError(f"{option}: cannot read {str(file)!r}: {error}") from error


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix in {".gz", ".zst"} else file.suffix


def _open(file: Path, option: str) -> io.BufferedReader:
    if file.suffix == ".gz":
        return io.BufferedReader(cast(Any, gzip.open(file, "rb")))
    if file.suffix != ".zst":
        return file.open("rb")
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"{option}: {str(file)!r} needs the package zstandard: pip install zstandard") from error

    class Source(io.RawIOBase):
        """zstandard's own errors as OSError, like every other damaged file."""

        def __init__(self) -> None:
            self.raw = file.open("rb")
            self.reader = zstandard.ZstdDecompressor().stream_reader(self.raw, read_across_frames=True)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            try:
                return self.reader.readinto(buffer)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error

        def close(self) -> None:
            self.raw.close()
            super().close()

    return io.BufferedReader(Source())


def _record(source: str, value: Any) -> Record:
    if isinstance(value, dict):
        return Record(source, value)
    return Record(source, None, f"not a JSON object but {type(value).__name__}")


def _read_lines(stream: BinaryIO, name: str) -> Iterator[Record]:
    for number, line in enumerate(stream, 1):
        source = f"{name}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text:
                yield _record(source, json.loads(text))
        except UnicodeDecodeError:
            yield Record(source, None, "not UTF-8 text")
        except (ValueError, RecursionError):
            yield Record(source, None, "not JSON")


def _starts_array(stream: io.BufferedReader) -> bool:
    return stream.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_array(stream: BinaryIO, name: str) -> Iterator[Record]:
    # A damaged element ends the file: behind it there is no way to tell where the next one starts.
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
    decoder = json.JSONDecoder()
    buffer, position, ended, number = reader.read(_CHUNK).lstrip(), 1, False, 0
    while True:
        while position < len(buffer) and buffer[position] in " \t\r\n,":
            position += 1
        if position < len(buffer) and buffer[position] == "]":
            return
        source = f"{name}:{number + 1}"
        try:
            value, end = decoder.raw_decode(buffer, position)
            # A value that touches the end of the buffer may go on in the next chunk.
            complete = ended or buffer[end:].lstrip() != ""
        except RecursionError:
            yield Record(source, None, "not JSON")
            return
        except ValueError:
            value, end, complete = None, position, False
        if complete:
            number += 1
            position = end
            yield _record(source, value)
            continue
        if ended or len(buffer) - position > _LONGEST:
            yield Record(source, None, "not JSON: the array breaks off or is damaged here")
            return
        # Doubling keeps a value longer than the chunk linear in its length.
        more = reader.read(max(_CHUNK, len(buffer) - position))
        ended = not more
        buffer, position = buffer[position:] + more, 0


def _read_parquet(file: Path, name: str) -> Iterator[Record]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        yield from _from_batches(parquet.iter_batches(batch_size=_BATCH), name)


def _read_arrow(file: Path, name: str) -> Iterator[Record]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        yield from _from_batches(batches, name)


def _read_dataset(folder: Path, name: str) -> Iterator[Record]:
    import datasets

    dataset = datasets.load_from_disk(str(folder))
    assert isinstance(dataset, datasets.Dataset)  # a DatasetDict was refused by resolve_files
    tables = dataset.with_format("arrow").iter(batch_size=_BATCH)
    yield from _from_batches((batch for table in tables for batch in cast(Any, table).to_batches()), name)


def _from_batches(batches: Iterator[Any], name: str) -> Iterator[Record]:
    number = 0
    for batch in batches:
        # Slices keep the Python objects of few rows alive, whatever the size of the file's own batches.
        for start in range(0, batch.num_rows, _BATCH):
            for value in batch.slice(start, _BATCH).to_pylist():
                number += 1
                yield Record(f"{name}:{number}", {key: _without_nulls(item) for key, item in value.items()})


def _without_nulls(value: Any) -> Any:
    # A column of structs gives every row the keys of all rows, null where a row has none: a tool call would show
    # the arguments of all the other calls.
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value
