"""The batch plan: a pure function of row lengths, seed, epoch, token budget and buckets."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

# Rows of a bucket are sorted by length only inside windows of so many batches: sorting all of them would train short
# rows together always, single rows would waste padding.
_WINDOW_BATCHES = 32


class BatchPlan:
    """Ordered batches of row numbers whose padded size stays within the token budget.

    Which rows share a batch, and their order in it, follows from the lengths and the seed alone; the epoch shuffles
    the order of the batches. Hidden states depend in their last bits on a row's neighbours and padding, so batches
    that stay the same are what lets a cache give the very states that the target would. It also gives every epoch the
    same number of batches (Lightning reads a loader's length once).

    Args:
        lengths: tokens of each row; rows of length 0 are left out.
        token_budget: most padded tokens (rows times longest row) of a batch.
        num_buckets: length buckets of about equal token counts; rows of a batch come from one bucket.
        seed, epoch: make the order; the same arguments always give the same plan.
        shuffle: False keeps rows and batches in order of length (validation).

    Raises:
        ValueError: a row is longer than the token budget.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer],
        *,
        token_budget: int,
        num_buckets: int = 6,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if num_buckets < 1:
            raise ValueError(f"num_buckets={num_buckets}: at least 1")
        longest = int(self.lengths.max(initial=0))
        if longest > token_budget:
            raise ValueError(f"token_budget={token_budget}: smaller than the longest row, {longest} tokens")
        rng = np.random.default_rng([seed, 0]) if shuffle else None
        self._rows, sizes = _batches(self.lengths, token_budget, num_buckets, rng)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._ends = np.cumsum(self._sizes)
        order = np.random.default_rng([seed, 1, epoch]).permutation if shuffle else np.arange
        self._order = order(len(sizes))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> list[int]:
        """Row numbers of batch `number`."""
        place = self._order[number]
        end = self._ends[place]
        return self._rows[end - self._sizes[place] : end].tolist()

    def padding_waste(self) -> float:
        """Share of padded tokens that are padding."""
        if not len(self):
            return 0.0
        real = self.lengths[self._rows]
        longest = np.maximum.reduceat(real, self._ends - self._sizes)
        return float(1.0 - real.sum() / (longest * self._sizes).sum())


def _batches(
    lengths: NDArray[np.int64], budget: int, num_buckets: int, rng: np.random.Generator | None
) -> tuple[NDArray[np.int64], list[int]]:
    """Rows, batch after batch, and the number of rows of each batch."""
    rows = np.flatnonzero(lengths)
    if not len(rows):
        return rows, []
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    tokens = np.cumsum(lengths[rows])
    bounds = np.searchsorted(tokens, tokens[-1] * np.arange(1, num_buckets) / num_buckets)
    parts: list[NDArray[np.int64]] = []
    sizes: list[int] = []
    for bucket in np.split(rows, bounds):
        if not len(bucket):
            continue
        if rng is not None:
            bucket = rng.permutation(bucket)
        window = max(1, int(_WINDOW_BATCHES * budget / lengths[bucket].mean()))
        for start in range(0, len(bucket), window):
            part = bucket[start : start + window]
            # Longest first: the first row of a batch fixes its padded length, so its size follows by division.
            part = part[np.argsort(-lengths[part], kind="stable")]
            at = 0
            while at < len(part):
                size = min(budget // int(lengths[part[at]]), len(part) - at)
                sizes.append(size)
                at += size
            parts.append(part)
    return np.concatenate(parts), sizes


def plan_fingerprint(data: str, lengths: NDArray[np.integer], *, token_budget: int, num_buckets: int, seed: int) -> str:
    """What a resumed run compares: the same string means the same batches in every epoch."""
    head = f"2:{data}:{token_budget}:{num_buckets}:{seed}:".encode()
    return hashlib.sha256(head + np.ascontiguousarray(lengths, dtype=np.int64).tobytes()).hexdigest()[:32]
