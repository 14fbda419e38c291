"""Records from files: JSONL (plain, .gz, .zst), JSON arrays, Parquet, Arrow files and `datasets` folders."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .chunks import ARROW_SUFFIXES, LINE_SUFFIXES, Chunk, read_chunks, suffix

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
    if suffix(file) not in {*LINE_SUFFIXES, *ARROW_SUFFIXES, ".parquet"}:
        raise ValueError(f"{option}: cannot tell what {str(file)!r} is by its name; expected {_KINDS}")
    if file.stat().st_size == 0:
        raise ValueError(f"{option}: file {str(file)!r} is empty")


def read_records(file: Path, option: str = "data.train", name: str | None = None) -> Iterator[Record]:
    """Every record of one file, bad ones included; `name` stands for the file in the records' sources.

    Raises ValueError as `read_chunks` does.
    """
    for chunk in read_chunks(file, option):
        yield from chunk_records(chunk, name or file.name)


def chunk_records(chunk: Chunk, name: str) -> Iterator[Record]:
    """The records of a chunk, bad ones included."""
    if chunk.kind == "lines":
        # Not `splitlines`, which splits at a lone carriage return, too.
        texts = enumerate(chunk.data.split(b"\n"), chunk.first)
        records = (_from_line(f"{name}:{number}", line, number == 1) for number, line in texts)
        yield from (record for record in records if record)
    elif chunk.kind == "values":
        for number, text in enumerate(chunk.data, chunk.first):
            yield _from_json(f"{name}:{number}", text)
    else:
        import pyarrow as pa

        values = pa.ipc.open_stream(chunk.data).read_all().to_pylist()
        for number, value in enumerate(values, chunk.first):
            yield Record(f"{name}:{number}", {key: _without_nulls(item) for key, item in value.items()})
    if chunk.fault:
        yield Record(f"{name}:{chunk.first + chunk.records}", None, chunk.fault)


def _from_line(source: str, line: bytes, first: bool) -> Record | None:
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError:
        return Record(source, None, "not UTF-8 text")
    return _from_json(source, text) if text else None


def _from_json(source: str, text: str) -> Record:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Record(source, None, "not JSON")
    if isinstance(value, dict):
        return Record(source, value)
    return Record(source, None, f"not a JSON object but {type(value).__name__}")


def _without_nulls(value: Any) -> Any:
    # A column of structs gives every row the keys of all rows, null where a row has none: a tool call would show
    # the arguments of all the other calls.
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value
