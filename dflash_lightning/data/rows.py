"""Prepared folders: Arrow datasets of rows, memory-mapped by every process that reads them.

A prepared folder is what `datasets.load_from_disk` reads (columns `input_ids`, `loss_mask`, `source`, `group`),
and a `report.json` beside the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

REPORT = "report.json"
MOST_ROWS_WITH_MASK_TOKEN = 0.01  # above this share it is no oddity of a few rows but a token of the language
FORMAT_VERSION = 2  # of prepared folders
RULES_VERSION = 3  # raised when the same records give other rows
VERSIONS = (FORMAT_VERSION, RULES_VERSION)  # part of every cache key


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is a folder that `prepare_rows` wrote."""
    return (Path(path) / REPORT).is_file() and (Path(path) / "state.json").is_file()


def load_rows(path: str | Path, option: str = "data.train") -> Dataset:
    """The rows of a prepared folder, memory-mapped.

    Raises FileNotFoundError or ValueError, naming the option, for what is not such a folder.
    """
    import datasets

    if not Path(path).is_dir():
        raise FileNotFoundError(f"{option}: there is no folder {str(path)!r}")
    if not is_prepared(path):
        raise ValueError(f"{option}: {str(path)!r} is no prepared folder; make one with `dflash prepare`")
    report = read_report(path)
    if report.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{option}: {str(path)!r} has format version {report.get('format_version')}, this version of "
            f"dflash-lightning reads {FORMAT_VERSION}; prepare it again"
        )
    dataset = datasets.load_from_disk(str(path))
    schema = cast(Any, dataset).data.schema
    for column, kind in (("input_ids", "list<int32>"), ("loss_mask", "list<uint8>"), ("group", "uint64")):
        found = schema.field(column).type if column in schema.names else None
        if str(found).replace("item: ", "").replace("element: ", "") != kind:
            raise ValueError(f"{option}: {str(path)!r} has no column {column!r} of type {kind} but {found}")
    if len(dataset) != report.get("rows"):
        raise ValueError(f"{option}: {str(path)!r} holds {len(dataset)} rows, its report {report.get('rows')}")
    assert isinstance(dataset, datasets.Dataset)
    return dataset


def read_report(path: str | Path) -> dict[str, Any]:
    """The `report.json` of a prepared folder."""
    return json.loads((Path(path) / REPORT).read_text(encoding="utf-8"))


class ContentHash:
    """Hash of rows that depends on their ids, masks and order alone: not on sources, chunks, paths or machines."""

    def __init__(self) -> None:
        self._parts = [hashlib.blake2b(digest_size=16) for _ in range(3)]

    def update(self, lengths: np.ndarray, ids: np.ndarray, masks: np.ndarray) -> None:
        """Add rows: their lengths, and their ids and masks one row after the other."""
        for part, values, kind in zip(self._parts, (lengths, ids, masks), ("<i8", "<i4", "u1"), strict=True):
            part.update(np.ascontiguousarray(values, dtype=kind).data)

    def hexdigest(self) -> str:
        return hashlib.blake2b(b"".join(part.digest() for part in self._parts), digest_size=16).hexdigest()


def dataset_fingerprint(dataset: Dataset) -> str:
    """Hash of the rows' content, the same on every machine and path.

    Taken from the folder's report when the dataset is a prepared folder as a whole, else computed from all its rows.
    """
    files = cast(Any, dataset).cache_files
    if files and getattr(dataset, "_indices", None) is None:
        folders = {Path(file["filename"]).parent for file in files}
        if len(folders) == 1 and is_prepared(folder := folders.pop()):
            report = read_report(folder)
            names = {shard["filename"] for shard in json.loads((folder / "state.json").read_text())["_data_files"]}
            whole = names == {Path(file["filename"]).name for file in files}
            if whole and report.get("rows") == len(dataset) and report.get("content_hash"):
                return report["content_hash"]
    content = ContentHash()
    for batch in _arrow_batches(dataset):
        ids, masks = batch.column("input_ids"), batch.column("loss_mask")
        lengths = ids.value_lengths().to_numpy(zero_copy_only=False)
        content.update(lengths, ids.flatten().to_numpy(), masks.flatten().to_numpy())
    return content.hexdigest()


def _arrow_batches(dataset: Dataset) -> Iterable[Any]:
    for table in cast(Any, dataset).with_format("arrow").iter(batch_size=1000):
        yield from table.select(["input_ids", "loss_mask"]).to_batches()
