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

    Every epoch has the same number of batches (Lightning reads a loader's length once): which length class stands at
    which place of which batch follows from the seed alone; which row of that class stands there, and the order of the
    batches, from seed and epoch.

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
        rows = np.flatnonzero(self.lengths)
        row_classes = np.minimum(_length_class(self.lengths[rows]), token_budget)
        rng = np.random.default_rng([seed, 0]) if shuffle else None
        place_classes, sizes = _places(np.sort(row_classes), token_budget, num_buckets, rng)

        # Rows in random order inside a class, handed to the places of that class.
        rng = np.random.default_rng([seed, 1, epoch]) if shuffle else None
        shuffled = rng.permutation(len(rows)) if rng is not None else np.arange(len(rows))
        by_class = shuffled[np.argsort(row_classes[shuffled], kind="stable")]
        self._rows = np.empty(len(rows), np.int64)
        self._rows[np.argsort(place_classes, kind="stable")] = rows[by_class]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._order = rng.permutation(len(sizes)) if rng is not None else np.arange(len(sizes))

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


def _length_class(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths rounded up to one of 16 steps an octave: rows of a class may stand for each other."""
    step = np.maximum(1, 2 ** np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64) // 16)
    return -(-lengths // step) * step


def _places(
    classes: NDArray[np.int64], budget: int, num_buckets: int, rng: np.random.Generator | None
) -> tuple[NDArray[np.int64], list[int]]:
    """Length class of every place, batch after batch, and the size of each batch; `classes` come sorted."""
    if not len(classes):
        return classes, []
    tokens = np.cumsum(classes)
    bounds = np.searchsorted(tokens, tokens[-1] * np.arange(1, num_buckets) / num_buckets)
    parts: list[NDArray[np.int64]] = []
    sizes: list[int] = []
    for bucket in np.split(classes, bounds):
        if not len(bucket):
            continue
        if rng is not None:
            bucket = rng.permutation(bucket)
        window = max(1, int(_WINDOW_BATCHES * budget / bucket.mean()))
        for start in range(0, len(bucket), window):
            # Longest first: the first place of a batch fixes its padded length, so its size follows by division.
            part = -np.sort(-bucket[start : start + window])
            at = 0
            while at < len(part):
                size = min(budget // int(part[at]), len(part) - at)
                sizes.append(size)
                at += size
            parts.append(part)
    return np.concatenate(parts), sizes


def plan_fingerprint(data: str, lengths: NDArray[np.integer], *, token_budget: int, num_buckets: int, seed: int) -> str:
    """What a resumed run compares: the same string means the same batches in every epoch."""
    head = f"1:{data}:{token_budget}:{num_buckets}:{seed}:".encode()
    return hashlib.sha256(head + np.ascontiguousarray(lengths, dtype=np.int64).tobytes()).hexdigest()[:32]
