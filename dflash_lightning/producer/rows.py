"""The rows of a run as every producer reads them: memory-mapped Arrow columns, without the target."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_lightning.producer.slots import SlotViews


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch: `ids` int32 and `masks` uint8, an array a row."""

    stream: str
    numbers: Sequence[int]
    ids: list[NDArray[np.int32]]
    masks: list[NDArray[np.uint8]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids in self.ids]

    def hashes(self) -> list[str]:
        """The name of each row by its token ids, 32 hex digits."""
        return [hashlib.blake2b(ids.astype("<i4", copy=False).data, digest_size=16).hexdigest() for ids in self.ids]

    def write_tokens(self, lengths: Sequence[int], out: SlotViews) -> None:
        """Write ids and masks one row after the other; a length of 0 leaves the row out."""
        _join(self.ids, lengths, out.input_ids)
        _join(self.masks, lengths, out.loss_mask)


class RowReader:
    """Reads rows by number.

    Args:
        folders: stream name -> folder of its Arrow rows.
        max_seq_len: rows are cut to so many tokens.
    """

    def __init__(self, folders: Mapping[str, str], max_seq_len: int) -> None:
        import datasets

        self.max_seq_len = max_seq_len
        loaded = {name: datasets.load_from_disk(path) for name, path in folders.items()}
        self._tables: dict[str, Any] = {name: rows.with_format("arrow") for name, rows in loaded.items()}

    def load(self, stream: str, numbers: Sequence[int]) -> BatchRows:
        """Rows `numbers` of `stream`."""
        table = self._tables[stream][list(numbers)]
        ids, masks = (self._split(table.column(name)) for name in ("input_ids", "loss_mask"))
        return BatchRows(stream, numbers, ids, masks)

    def _split(self, column: Any) -> list[NDArray[Any]]:
        rows = []
        for chunk in column.chunks:
            offsets = chunk.offsets.to_numpy()
            values = chunk.values.to_numpy(zero_copy_only=False)
            for start, end in pairwise(offsets):
                rows.append(np.array(values[start : min(end, start + self.max_seq_len)]))
        return rows


def _join(rows: Sequence[NDArray[Any]], lengths: Sequence[int], out: Tensor) -> None:
    kept = [torch.as_tensor(row, dtype=out.dtype) for row, n in zip(rows, lengths, strict=True) if n]
    if kept:
        torch.cat(kept, out=out)
