"""A preparation on disk while it runs: finished parts beside the output, from which a stopped one goes on.

`.NAME.partial` holds `key.json` (what the parts were made of), the parts' progress, and in `rows` what will be the
prepared folder. It becomes one with a single rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .report import Counts, PrepareReport
from .rows import REPORT, ContentHash, is_prepared
from .work import ChunkRows, schema

_PART_TOKENS = 1 << 22  # tokens of a part, at least: some seconds of work, 20 MB
_MOST_PARTS = 64  # about; later parts are larger, up to
_LARGEST_PART = 1 << 27  # tokens, about 640 MB
_PENDING_TOKENS = 1 << 20  # tokens held before they are written


@dataclass
class Progress:
    """How far a preparation is: plain values, written with every part."""

    file: int = 0  # number of the input file
    record: int = 0  # last record of that file that was done
    rows: int = 0
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)
    files: list[dict[str, Any]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)  # of the file: see ChunkRows
    usable: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Progress:
        progress = Progress(**values)
        progress.counts = Counts(**values["counts"])
        return progress


class PartWriter:
    """Writes chunks of rows into parts and keeps them; call `lock` around its whole life.

    Args:
        out_dir: the folder to be.
        key: what the rows follow from; parts made from something else are thrown away.
    """

    def __init__(self, out_dir: Path, key: str) -> None:
        self.out_dir = out_dir
        self.work = out_dir.parent / f".{out_dir.name}.partial"
        self.rows = self.work / "rows"
        self.progress = Progress()
        self.parts: list[str] = []
        self._pending: list[Any] = []
        self._pending_tokens = self._part_tokens = 0
        self._close = contextlib.ExitStack()
        self._stream: Any = None
        self._features = _features()
        if _read_json(self.work / "key.json") == key:
            self._take_up()
        else:
            shutil.rmtree(self.work, ignore_errors=True)
            self.rows.mkdir(parents=True)
            _write_json(self.work / "key.json", key)

    def _take_up(self) -> None:
        while values := _read_json(self.work / f"{len(self.parts)}.json"):
            self.parts.append(f"data-{len(self.parts):05d}.arrow")
            self.progress = Progress.from_dict(values)
        self.rows.mkdir(exist_ok=True)
        for file in self.rows.iterdir():
            if file.name not in self.parts:
                file.unlink()

    def add(self, chunk: ChunkRows) -> None:
        """Add the rows of a chunk; `progress` must stand behind it already."""
        import pyarrow as pa

        if chunk.batch:
            self._pending.append(pa.ipc.read_record_batch(chunk.batch, schema()))
            self._pending_tokens += chunk.tokens
            self.progress.rows += chunk.counts.rows
            self.progress.tokens += chunk.tokens
        if self._pending_tokens >= _PENDING_TOKENS:
            self._flush()
        if self._part_tokens >= min(max(_PART_TOKENS, self.progress.tokens // _MOST_PARTS), _LARGEST_PART):
            self.end_part()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._pending:
            return
        if self._stream is None:
            sink = self._close.enter_context(pa.OSFile(str(self.rows / "part.tmp"), "wb"))
            self._stream = self._close.enter_context(pa.ipc.new_stream(sink, self._features.arrow_schema))
        (batch,) = pa.Table.from_batches(self._pending).combine_chunks().to_batches()
        self._stream.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=self._features.arrow_schema))
        self._part_tokens += self._pending_tokens
        self._pending, self._pending_tokens = [], 0

    def end_part(self) -> None:
        """Make what was added so far survive this process."""
        self._flush()
        if self._stream is None:
            return
        self.close()
        name = f"data-{len(self.parts):05d}.arrow"
        _sync(self.rows / "part.tmp")
        (self.rows / "part.tmp").replace(self.rows / name)
        _write_json(self.work / f"{len(self.parts)}.json", self.progress.as_dict())
        self.parts.append(name)
        self._part_tokens = 0

    def close(self) -> None:
        """Close the open file, if any."""
        self._close.close()
        self._stream = None

    def discard(self) -> None:
        """Throw the parts away."""
        self.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def measure(self) -> tuple[np.ndarray, np.ndarray, int, str]:
        """Tokens and supervised tokens of each row, largest token id, content hash: one pass over the parts."""
        import pyarrow as pa

        content, lengths, supervised, largest = ContentHash(), [], [], -1
        for name in self.parts:
            # Not memory-mapped: pages of a map would count as this process's memory.
            with pa.OSFile(str(self.rows / name)) as source:
                for batch in pa.ipc.open_stream(source):
                    ids, masks = batch.column(0), batch.column(1)
                    sizes = ids.value_lengths().to_numpy(zero_copy_only=False)
                    flat_ids, flat_masks = ids.flatten().to_numpy(), masks.flatten().to_numpy()
                    content.update(sizes, flat_ids, flat_masks)
                    lengths.append(sizes.astype(np.int32))
                    starts = np.cumsum(sizes) - sizes
                    supervised.append(np.add.reduceat(flat_masks, starts, dtype=np.int32))
                    largest = max(largest, int(flat_ids.max()))
        return np.concatenate(lengths), np.concatenate(supervised), largest, content.hexdigest()

    def finish(self, report: PrepareReport) -> None:
        """Write what makes the rows a dataset, the report last."""
        import datasets

        datasets.DatasetInfo(features=self._features).write_to_directory(str(self.rows))
        state = {
            "_data_files": [{"filename": name} for name in self.parts],
            "_fingerprint": report.content_hash,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self.rows / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        (self.rows / REPORT).write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")

    def take_place(self) -> None:
        """Put the finished folder in its place; a prepared folder that stands there makes way."""
        old = self.work / "old"
        while True:
            try:
                self.rows.replace(self.out_dir)
                break
            except OSError:
                # A folder that is not empty cannot be replaced in one step: it is moved aside first.
                if not is_prepared(self.out_dir):
                    raise
                self.out_dir.replace(old)
        shutil.rmtree(self.work, ignore_errors=True)


@contextlib.contextmanager
def lock(out_dir: Path, wait: bool, option: str) -> Iterator[None]:
    """Hold the right to prepare `out_dir`. Without `wait`, ValueError when another process holds it."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    path = out_dir.parent / f".{out_dir.name}.lock"
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                os.close(descriptor)
                raise ValueError(f"{option}: another process is preparing {str(out_dir)!r} right now") from None
            print(f"waiting for another process that prepares {option}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The one who held it before may have taken the file away: then the lock that counts is another file's.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _features() -> Any:
    import datasets

    columns: dict[str, Any] = {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("uint8")),
        "source": datasets.Value("string"),
        "group": datasets.Value("uint64"),
    }
    return datasets.Features(columns)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # not there, or cut off by a power failure
        return None


def _write_json(file: Path, values: Any) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(values), encoding="utf-8")
    _sync(temporary)
    temporary.replace(file)


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
