"""Which rows of a prepared dataset a run can train on, found over Arrow buffers without a loop over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .rows import MOST_ROWS_WITH_MASK_TOKEN

if TYPE_CHECKING:
    import datasets

_BLOCK_ROWS = 100_000


def usable_lengths(
    rows: datasets.Dataset,
    *,
    max_seq_len: int,
    min_supervised_tokens: int,
    mask_token_id: int | None,
    vocab_size: int,
    option: str,
) -> tuple[NDArray[np.int64], str]:
    """Tokens of each row, cut at `max_seq_len`, 0 for rows that cannot be used; and a sentence that counts those.

    Raises:
        ValueError: ids outside the vocabulary, a mask token in more than 1 % of the rows, no usable row at all.
    """
    lengths = np.zeros(len(rows), np.int64)
    short = masked = 0
    table: Any = rows.with_format("arrow")
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = table[first : first + _BLOCK_ROWS]
        ids, offsets = _flat(block.column("input_ids"))
        mask, _ = _flat(block.column("loss_mask"))
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            row = first + int(np.searchsorted(offsets, np.argmax((ids < 0) | (ids >= vocab_size)), side="right")) - 1
            raise ValueError(f"{option}: row {row} holds a token id outside the target's vocabulary of {vocab_size}")
        full = np.diff(offsets)
        kept = np.minimum(full, max_seq_len)
        inside = np.arange(len(ids)) - np.repeat(offsets[:-1], full) < max_seq_len
        supervised = _row_sums((mask != 0) & inside, offsets)
        holds_mask = _row_sums((ids == mask_token_id) & inside, offsets) > 0
        too_short = supervised < min_supervised_tokens
        short += int(too_short.sum())
        masked += int((holds_mask & ~too_short).sum())
        lengths[first : first + len(full)] = np.where(too_short | holds_mask, 0, kept)
    if masked > MOST_ROWS_WITH_MASK_TOKEN * len(rows) and masked > 1:
        raise ValueError(
            f"model.mask_token_id={mask_token_id} is a token in use: {masked} of {len(rows)} rows of {option} hold it; "
            "choose an id that the data never holds"
        )
    if not lengths.any():
        raise ValueError(f"{option}: none of {len(rows)} rows has {min_supervised_tokens} supervised tokens")
    if not short + masked:
        return lengths, ""
    return lengths, (
        f"{option}: {short + masked} of {len(rows)} rows left out: {short} with fewer than {min_supervised_tokens} "
        f"supervised tokens, {masked} that hold the mask token {mask_token_id}"
    )


def _flat(column: Any) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values and row offsets (from 0) of a chunked list column."""
    array = column.combine_chunks()
    if hasattr(array, "chunks"):  # combine_chunks of no or several chunks
        array = array.chunk(0)
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values, offsets - offsets[0]


def _row_sums(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.concatenate([[0], np.cumsum(flags)])
    return total[offsets[1:]] - total[offsets[:-1]]
