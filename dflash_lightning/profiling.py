"""Stage timings of one process: `span`, `_prof_add` and the ProfileStats behind them.

Every thread adds to a table of its own, so the hot path takes no lock; readers merge the tables. A stage keeps count,
total and maximum: memory does not grow with the number of spans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

STAGES = (
    "target.load_batch",
    "target.model_forward",
    "target.pack_hidden",
    "target.copy_to_host",
    "target.queue_put_wait",
    "drafter.queue_wait",
    "drafter.copy_to_device",
    "drafter.forward",
    "drafter.backward",
    "drafter.optimizer_step",
    "drafter.grad_norm_sync",
    "drafter.metrics_sync",
    "dflash.block_layout",
    "dflash.create_block_mask_swa",
    "dflash.create_block_mask_full",
    "dflash.layers",
    "dflash.loss",
)


@dataclass(frozen=True)
class StageTotal:
    """Sum over the spans of one stage. Times in seconds."""

    count: int
    total: float
    max: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


class _Span:
    """Times its `with` block and adds it to the calling thread's table."""

    __slots__ = ("add", "stage", "start")

    def __init__(self, add: Callable[[str, float], None], stage: str) -> None:
        self.add = add
        self.stage = stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.add(self.stage, time.perf_counter() - self.start)


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


_NO_SPAN = _NoSpan()


# Stage -> [count, total, maximum of the window, maximum], written by one thread only.
_Table = dict[str, list[float]]


class ProfileStats:
    """Thread-safe stage timings: a cumulative view and a window view. Disabled, every call is a no-op.

    Args:
        enabled: False turns `add` and `span` into no-ops.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._local = threading.local()
        self._tables: list[_Table] = []
        self._reader_lock = threading.Lock()
        self._seen: dict[str, tuple[int, float]] = {}

    def _table(self) -> _Table:
        table: _Table = {}
        with self._reader_lock:
            self._tables.append(table)
        self._local.table = table
        return table

    def add(self, stage: str, seconds: float) -> None:
        """Add one span of `seconds` to `stage`."""
        if not self.enabled:
            return
        try:
            table = self._local.table
        except AttributeError:
            table = self._table()
        entry = table.get(stage)
        if entry is None:
            # Built first, stored last: a reader in another thread sees all of it or nothing.
            table[stage] = [1, seconds, seconds, seconds]
            return
        entry[0] += 1
        entry[1] += seconds
        if seconds > entry[2]:
            entry[2] = seconds
        if seconds > entry[3]:
            entry[3] = seconds

    def span(self, stage: str) -> AbstractContextManager[None]:
        """Context manager that times its block under `stage`."""
        return _Span(self.add, stage) if self.enabled else _NO_SPAN

    def cumulative(self) -> dict[str, StageTotal]:
        """Every stage since the start, over all threads."""
        with self._reader_lock:
            tables = list(self._tables)
        merged: dict[str, StageTotal] = {}
        for table in tables:
            for stage, (count, total, _, maximum) in list(table.items()):
                merged[stage] = _plus(merged.get(stage), int(count), total, maximum)
        return merged

    def window(self) -> dict[str, StageTotal]:
        """Every stage that ended a span since the last call of `window`, over all threads."""
        result: dict[str, StageTotal] = {}
        with self._reader_lock:
            window_max: dict[str, float] = {}
            for table in self._tables:
                for stage, entry in list(table.items()):
                    window_max[stage] = max(window_max.get(stage, 0.0), entry[2])
                    entry[2] = 0.0  # a span that ends in this very instant may lose its maximum, never its time
        for stage, now in self.cumulative().items():
            count, total = self._seen.get(stage, (0, 0.0))
            if now.count > count:
                result[stage] = StageTotal(now.count - count, now.total - total, window_max.get(stage, 0.0))
            self._seen[stage] = (now.count, now.total)
        return result

    def merge(self, other: ProfileStats | Mapping[str, StageTotal]) -> None:
        """Add another instance's cumulative values, or a table of totals (a producer's, say), to this one."""
        totals = other.cumulative() if isinstance(other, ProfileStats) else other
        if not self.enabled:
            return
        try:
            table = self._local.table
        except AttributeError:
            table = self._table()
        for stage, item in totals.items():
            entry = table.setdefault(stage, [0, 0.0, 0.0, 0.0])
            entry[0] += item.count
            entry[1] += item.total
            entry[2] = max(entry[2], item.max)
            entry[3] = max(entry[3], item.max)

    def print(self) -> None:
        """Print the cumulative table, longest stage first. Milliseconds a span, seconds in total."""
        print(format_table(self.cumulative()))


def _plus(item: StageTotal | None, count: int, total: float, maximum: float) -> StageTotal:
    if item is None:
        return StageTotal(count, total, maximum)
    return StageTotal(item.count + count, item.total + total, max(item.max, maximum))


def format_table(totals: Mapping[str, StageTotal]) -> str:
    """A text table of stage totals, longest stage first."""
    lines = [f"{'stage':<32} {'count':>8} {'mean ms':>10} {'max ms':>10} {'total s':>10}"]
    for stage, item in sorted(totals.items(), key=lambda pair: -pair[1].total):
        lines.append(
            f"{stage:<32} {item.count:>8} {item.mean * 1e3:>10.2f} {item.max * 1e3:>10.2f} {item.total:>10.2f}"
        )
    return "\n".join(lines)


_process_stats = ProfileStats()


def process_stats() -> ProfileStats:
    """The ProfileStats of this process, which `_prof_add` and `span` feed."""
    return _process_stats


def _prof_add(stage: str, seconds: float) -> None:
    """Add one span to the process's own instance."""
    _process_stats.add(stage, seconds)


def span(stage: str) -> AbstractContextManager[None]:
    """Time a block under `stage` in the process's own instance."""
    return _process_stats.span(stage)
