"""Rows to the Arrow files of a prepared folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from .render import Row
from .report import PrepareReport
from .rows import REPORT, ContentHash

_SHARD_TOKENS = 1 << 27  # tokens of one Arrow file, about 640 MB
_PENDING_TOKENS = 1 << 20  # tokens held before they are written
_PENDING_ROWS = 4096


class RowWriter:
    """Writes rows as Arrow stream files in the layout of `datasets.save_to_disk`, some thousand at a time.

    The folder appears with the first rows.
    """

    def __init__(self, folder: Path) -> None:
        import datasets

        features: dict[str, Any] = {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("uint8")),
            "source": datasets.Value("string"),
        }
        self.folder = folder
        self.features = datasets.Features(features)
        self.schema = self.features.arrow_schema
        self.pending: list[tuple[Row, str]] = []
        self.pending_tokens = self.shard_tokens = self.rows = self.tokens = self.supervised = 0
        self.max_token_id = -1
        self.lengths: list[np.ndarray] = []
        self.shards: list[str] = []
        self.content = ContentHash()
        self._close = contextlib.ExitStack()
        self._stream: Any = None

    def add(self, rows: list[Row], source: str) -> None:
        """Add the rows of one record."""
        for row in rows:
            self.pending.append((row, source))
            self.pending_tokens += len(row.input_ids)
        self.rows += len(rows)
        if self.pending_tokens >= _PENDING_TOKENS or len(self.pending) >= _PENDING_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self.pending:
            return
        lengths = np.array([len(row.input_ids) for row, _ in self.pending], dtype=np.int64)
        ids = np.concatenate([row.input_ids for row, _ in self.pending])
        masks = np.concatenate([row.loss_mask for row, _ in self.pending])
        self.content.update(lengths, ids, masks)
        self.lengths.append(lengths)
        self.tokens += len(ids)
        self.supervised += int(masks.sum())
        self.max_token_id = max(self.max_token_id, int(ids.max()))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(masks)),
            pa.array([source for _, source in self.pending]),
        ]
        if self._stream is None or self.shard_tokens > _SHARD_TOKENS:
            self._next_shard()
        assert self._stream is not None
        self._stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=self.schema))
        self.shard_tokens += len(ids)
        self.pending, self.pending_tokens = [], 0

    def close(self) -> None:
        """Close the open file, if any."""
        self._close.close()

    def _next_shard(self) -> None:
        import pyarrow as pa

        self._close.close()
        self.folder.mkdir(exist_ok=True)
        self.shards.append(f"data-{len(self.shards):05d}.arrow")
        sink = self._close.enter_context(pa.OSFile(str(self.folder / self.shards[-1]), "wb"))
        self._stream = self._close.enter_context(pa.ipc.new_stream(sink, self.schema))
        self.shard_tokens = 0

    def finish(self, report: PrepareReport) -> None:
        """Close the shards and write what makes the folder a dataset, the report last."""
        import datasets

        self._flush()
        self._close.close()
        report.finish(np.concatenate(self.lengths), self.tokens, self.supervised, self.content.hexdigest())
        report.max_token_id = self.max_token_id
        datasets.DatasetInfo(features=self.features).write_to_directory(str(self.folder))
        state = {
            "_data_files": [{"filename": name} for name in self.shards],
            "_fingerprint": report.content_hash,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self.folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        (self.folder / REPORT).write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
