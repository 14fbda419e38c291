"""Stage timings of one process: `span`, `_prof_add` and the ProfileStats behind them.

The hot path appends one record to a short list of the calling thread and takes no lock. Full lists are folded into the
stage table (count, total, maximum, histogram) under a lock, by their thread or by a reader: memory does not grow with
the number of spans. The newest records stay at hand for the timeline.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np

STAGES = (
    "target.load_batch",
    "target.model_forward",
    "target.pack_hidden",
    "target.copy_to_host",
    "target.cache_write",
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

# Records that a thread collects before they are folded: 0.1 us a span for folding, 60 KB a thread.
_FOLD_AT = 512
_KEPT = 10_000  # spans that wait for `take_own`
# A histogram bucket is 4.4 % wide; it counts from 1 ns.
BUCKETS_PER_OCTAVE = 16
_SMALLEST = 1e-9

Event = tuple[str, float, float]  # stage, seconds, end on the `perf_counter` clock (one for all processes of a machine)


@dataclass(frozen=True)
class StageTotal:
    """Sum over the spans of one stage. Times in seconds; `histogram`: bucket -> spans, a bucket 1/16 octave."""

    count: int
    total: float
    max: float
    histogram: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The q-quantile, exact to half a bucket (2.2 %); without a histogram the mean."""
        wanted = q * sum(self.histogram.values())
        for bucket in sorted(self.histogram):
            wanted -= self.histogram[bucket]
            if wanted <= 0:
                return min(bucket_seconds(bucket), self.max)
        return self.mean

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        return self.quantile(0.95)

    def __add__(self, other: StageTotal) -> StageTotal:
        histogram = dict(self.histogram)
        for bucket, count in other.histogram.items():
            histogram[bucket] = histogram.get(bucket, 0) + count
        return StageTotal(self.count + other.count, self.total + other.total, max(self.max, other.max), histogram)

    def to_json(self) -> list[Any]:
        return [self.count, self.total, self.max, [list(pair) for pair in sorted(self.histogram.items())]]

    @classmethod
    def from_json(cls, data: list[Any]) -> StageTotal:
        return cls(int(data[0]), float(data[1]), float(data[2]), {int(b): int(n) for b, n in data[3]})


def bucket_seconds(bucket: int) -> float:
    """The middle of a histogram bucket."""
    return _SMALLEST * 2 ** ((bucket + 0.5) / BUCKETS_PER_OCTAVE)


class _Span:
    """Times its `with` block and records it for the calling thread."""

    __slots__ = ("stage", "start", "stats")

    def __init__(self, stats: ProfileStats, stage: str) -> None:
        self.stats = stats
        self.stage = stage

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        end = perf_counter()
        # `ProfileStats.record`, written out: a call would cost a tenth of the span.
        try:
            mine = self.stats._local.mine
        except AttributeError:
            mine = self.stats._begin_thread()
        records = mine.records
        records.append((self.stage, end - self.start, end))
        if len(records) >= _FOLD_AT:
            self.stats._turn_over(mine)


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        return None


_NO_SPAN = _NoSpan()


class _ThreadRecords:
    """What one thread has recorded: `records[folded:]` is not in the table yet. Only the thread itself appends."""

    __slots__ = ("folded", "kept", "older", "records", "taken", "thread", "wanted")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.records: list[Event] = []
        self.older: list[Event] = []  # the list before, for the timeline
        self.folded = 0
        self.wanted: frozenset[str] = frozenset()  # for `take_own`: these stages of `records[:taken]` are in `kept`
        self.kept: list[Event] = []
        self.taken = 0

    def keep_wanted(self) -> None:
        self.kept += [record for record in self.records[self.taken :] if record[0] in self.wanted]
        self.taken = len(self.records)


class _Entry:
    """One stage's row of the table."""

    __slots__ = ("count", "histogram", "max", "seen_count", "seen_histogram", "seen_total", "total", "window_max")

    def __init__(self) -> None:
        self.count, self.total, self.max, self.window_max = 0, 0.0, 0.0, 0.0
        self.histogram: Counter[int] = Counter()
        self.seen_count, self.seen_total = 0, 0.0
        self.seen_histogram: dict[int, int] = {}


class ProfileStats:
    """Thread-safe stage timings: a cumulative view and a window view. Disabled, every call is a no-op.

    Args:
        enabled: False turns `add` and `span` into no-ops.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._local = threading.local()
        self._threads: list[_ThreadRecords] = []
        self._table: dict[str, _Entry] = {}
        self._absorbed: list[Event] = []
        self._lock = threading.Lock()

    # Writing.

    def add(self, stage: str, seconds: float) -> None:
        """Add one span of `seconds` that ends now to `stage`."""
        if self.enabled:
            self.record(stage, seconds, perf_counter())

    def span(self, stage: str) -> AbstractContextManager[None]:
        """Context manager that times its block under `stage`."""
        return _Span(self, stage) if self.enabled else _NO_SPAN

    def record(self, stage: str, seconds: float, end: float) -> None:
        """Add one span that ended at `end` (`perf_counter`), whether enabled or not."""
        try:
            mine = self._local.mine
        except AttributeError:
            mine = self._begin_thread()
        records = mine.records
        records.append((stage, seconds, end))
        if len(records) >= _FOLD_AT:
            self._turn_over(mine)

    def _begin_thread(self) -> _ThreadRecords:
        mine = self._local.mine = _ThreadRecords()
        with self._lock:
            self._fold_all()  # lets go of ended threads, also where nobody ever reads
            self._threads.append(mine)
        return mine

    def _turn_over(self, mine: _ThreadRecords) -> None:
        """Fold a full list and begin the next. Called by its thread alone."""
        with self._lock:
            self._fold(mine)
            if mine.wanted:
                mine.keep_wanted()
                del mine.kept[:-_KEPT]
            mine.older, mine.records, mine.folded, mine.taken = mine.records, [], 0, 0

    def _fold(self, mine: _ThreadRecords) -> None:
        """Bring a thread's new records into the table. Under the lock."""
        fresh = mine.records[mine.folded :]
        mine.folded += len(fresh)
        groups: defaultdict[str, list[float]] = defaultdict(list)
        for stage, taken, _ in fresh:
            groups[stage].append(taken)
        seconds = np.array([value for values in groups.values() for value in values])
        buckets = (np.log2(np.maximum(seconds, _SMALLEST) / _SMALLEST) * BUCKETS_PER_OCTAVE).astype(np.int64).tolist()
        first = 0
        for stage, values in groups.items():
            entry = self._table.get(stage)
            if entry is None:
                entry = self._table[stage] = _Entry()
            entry.count += len(values)
            entry.total = sum(values, entry.total)
            entry.window_max = max(entry.window_max, max(values))
            entry.max = max(entry.max, entry.window_max)
            entry.histogram.update(buckets[first : first + len(values)])
            first += len(values)

    def _fold_all(self) -> None:
        for mine in self._threads:
            self._fold(mine)
        # A thread that has ended appends nothing more.
        self._threads = [m for m in self._threads if m.thread.is_alive() or m.folded < len(m.records)]

    # Reading.

    def cumulative(self) -> dict[str, StageTotal]:
        """Every stage since the start, over all threads."""
        with self._lock:
            self._fold_all()
            return {s: StageTotal(e.count, e.total, e.max, dict(e.histogram)) for s, e in self._table.items()}

    def window(self) -> dict[str, StageTotal]:
        """Every stage that ended a span since the last call of `window`, over all threads."""
        result: dict[str, StageTotal] = {}
        with self._lock:
            self._fold_all()
            for stage, e in self._table.items():
                if e.count == e.seen_count:
                    continue
                seen = e.seen_histogram
                histogram = {b: n - seen.get(b, 0) for b, n in e.histogram.items() if n != seen.get(b, 0)}
                result[stage] = StageTotal(e.count - e.seen_count, e.total - e.seen_total, e.window_max, histogram)
                e.seen_count, e.seen_total, e.seen_histogram, e.window_max = e.count, e.total, dict(e.histogram), 0.0
        return result

    def events(self, since: float = 0.0) -> dict[str, list[Event]]:
        """The newest spans (at least 512 where a thread has so many) that ended after `since`, by thread name."""
        with self._lock:
            lists = [(m.thread.name, [*m.older, *m.records]) for m in self._threads]
            lists.append(("", list(self._absorbed)))
        found: dict[str, list[Event]] = {}
        for name, events in lists:
            kept = [e for e in events if e[2] > since]
            if kept:
                found.setdefault(name, []).extend(kept)
        return found

    def take_own(self, stages: frozenset[str]) -> list[Event]:
        """Spans of `stages` that the calling thread has ended since it asked last, the newest 10,000 of them. No lock.

        The first call gives what is left of the time before it.
        """
        mine = getattr(self._local, "mine", None) or self._begin_thread()
        mine.wanted = stages
        mine.keep_wanted()
        found, mine.kept = mine.kept, []
        return found

    # Between instances and processes.

    def merge(self, other: ProfileStats | Mapping[str, StageTotal]) -> None:
        """Add another instance's cumulative values, or a table of totals (a producer's, say), to this one."""
        totals = other.cumulative() if isinstance(other, ProfileStats) else other
        if not self.enabled:
            return
        with self._lock:
            for stage, item in totals.items():
                entry = self._table.setdefault(stage, _Entry())
                entry.count += item.count
                entry.total += item.total
                entry.max = max(entry.max, item.max)
                entry.window_max = max(entry.window_max, item.max)
                entry.histogram.update(item.histogram)

    def report(self, since: float) -> dict[str, Any]:
        """What another process `absorb`s, plain JSON.

        The totals since the last call, and the calling thread's spans that ended after `since`.
        """
        events = self.events(since).get(threading.current_thread().name, [])
        return {"totals": {s: t.to_json() for s, t in self.window().items()}, "events": events[-_FOLD_AT:]}

    def absorb(self, report: Mapping[str, Any]) -> None:
        """Add another process's report."""
        self.merge({s: StageTotal.from_json(t) for s, t in report["totals"].items()})
        events = [(str(s), float(seconds), float(end)) for s, seconds, end in report["events"]]
        with self._lock:
            self._absorbed = [*self._absorbed, *events][-_FOLD_AT:]

    def print(self) -> None:
        """Print the cumulative table, longest stage first. Milliseconds a span, seconds in total."""
        print(format_table(self.cumulative()))


def format_table(totals: Mapping[str, StageTotal]) -> str:
    """A text table of stage totals, longest stage first."""
    lines = [f"{'stage':<32} {'count':>8} {'mean ms':>10} {'p50 ms':>10} {'p95 ms':>10} {'max ms':>10} {'total s':>10}"]
    for stage, item in sorted(totals.items(), key=lambda pair: -pair[1].total):
        times = " ".join(f"{seconds * 1e3:>10.2f}" for seconds in (item.mean, item.p50, item.p95, item.max))
        lines.append(f"{stage:<32} {item.count:>8} {times} {item.total:>10.2f}")
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


class Mirror(Protocol):
    """What is used of a Lightning profiler."""

    def start(self, action_name: str) -> None: ...

    def stop(self, action_name: str) -> None: ...


_mirror: Mirror | None = None


def mirror_main_spans(profiler: Mirror | None) -> None:
    """Let `profiler` receive every `main_span` from now on; None ends that."""
    global _mirror
    _mirror = profiler


def main_span(stage: str) -> AbstractContextManager[None]:
    """A `span` of the main thread, which the trainer's own profiler receives too."""
    return _process_stats.span(stage) if _mirror is None else _mirrored(stage, _process_stats.span(stage))


def mirror_alone(stage: str) -> AbstractContextManager[None]:
    """The trainer's own profiler's share of a `main_span`."""
    return _NO_SPAN if _mirror is None else _mirrored(stage, _NO_SPAN)


@contextmanager
def _mirrored(stage: str, inner: AbstractContextManager[None]) -> Iterator[None]:
    profiler, name = _mirror, f"[dflash]{stage}"
    assert profiler is not None
    profiler.start(name)
    try:
        with inner:
            yield
    finally:
        profiler.stop(name)
