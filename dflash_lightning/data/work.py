"""A chunk of records as rows: what a worker of `dflash prepare` does, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chunks import Chunk
from .identity import group_of, times_taken
from .messages import NO_COLUMN, Chat, SkipRow, parse_record
from .readers import chunk_records
from .render import Renderer, Row
from .report import Counts

_SHOWN = 20  # tokens of an answer in a warning
_COLUMNS = 50  # different columns named when a file has none that can be used


@dataclass
class ChunkRows:
    """The rows of one chunk."""

    last: int  # number of the last record
    counts: Counts = field(default_factory=Counts)
    columns: list[str] = field(default_factory=list)  # of records that no row could be made of
    usable: bool = False  # whether some record had a column that can be used
    tokens: int = 0
    batch: bytes = b""  # an Arrow record batch of the rows in `schema()`, b"" without rows


def schema() -> Any:
    """Arrow schema of prepared rows; `group` is that of `identity.group_of`."""
    import pyarrow as pa

    columns = {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())}
    return pa.schema([*columns.items(), ("source", pa.string()), ("group", pa.uint64())])


def chunk_rows(chunk: Chunk, name: str, weight: float, renderer: Renderer) -> ChunkRows:
    """Parse, render and tokenize a chunk of the file `name`, whose records count `weight` times."""
    result = ChunkRows(last=chunk.first + chunk.records - 1)
    counts, columns = result.counts, dict[str, None]()
    taken: list[tuple[Any, str, int, int]] = []
    for record in chunk_records(chunk, name):
        try:
            if record.value is None:
                raise SkipRow(record.fault)
            value = parse_record(record.value, renderer.vocab_size)
            times = times_taken(value, weight)
            group = group_of(value) if times else 0
        except SkipRow as skip:
            counts.skip(str(skip), record.source)
            if record.value is not None:
                result.usable |= str(skip) != NO_COLUMN
                columns.update(dict.fromkeys(record.value))
            continue
        result.usable = True
        if times:
            taken.append((value, record.source, times, group))
        else:
            counts.left_out += 1
    result.columns = list(columns)[:_COLUMNS]
    renderer.notes.clear()
    rows: list[tuple[Row, str, int]] = []
    made = renderer.rows([value for value, *_ in taken])
    for (value, source, times, group), found in zip(taken, made, strict=True):
        if isinstance(found, SkipRow):
            counts.skip(str(found), source)
            continue
        counts.records += 1
        if isinstance(value, Chat):
            _count_ends(found, renderer, counts)
        rows += [(row, source, group) for row in found] * times
    counts.rows = len(rows)
    counts.turns_unsupervised = dict(renderer.notes)
    if rows:
        result.tokens = sum(len(row.input_ids) for row, _, _ in rows)
        result.batch = _serialized(rows)
    return result


def _count_ends(rows: list[Row], renderer: Renderer, counts: Counts) -> None:
    for row in rows:
        if len(row.input_ids) == renderer.max_seq_len:
            continue  # cut off, perhaps before the answer's end
        last = int(np.flatnonzero(row.loss_mask)[-1])
        counts.answers += 1
        if int(row.input_ids[last]) in renderer.stop_ids:
            counts.answers_ended += 1
        elif not counts.unended:
            first = int(np.flatnonzero(row.loss_mask[:last] == 0)[-1:].max(initial=-1)) + 1
            answer = row.input_ids[first : last + 1][-_SHOWN:].tolist()
            counts.unended = str(renderer.tokenizer.decode(answer, skip_special_tokens=False))


def _serialized(rows: list[tuple[Row, str, int]]) -> bytes:
    import pyarrow as pa

    lengths = np.array([len(row.input_ids) for row, _, _ in rows], dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([row.input_ids for row, _, _ in rows]))),
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([row.loss_mask for row, _, _ in rows]))),
        pa.array([source for _, source, _ in rows]),
        pa.array(np.array([group for _, _, group in rows], dtype=np.uint64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema()).serialize().to_pybytes()
