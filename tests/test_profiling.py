"""ProfileStats: windows, threads, merging, the disabled state."""

from __future__ import annotations

import json
import threading
import tracemalloc

from dflash_lightning.profiling import ProfileStats, StageTotal


def test_cumulative_and_window_views() -> None:
    stats = ProfileStats()
    for seconds in (0.1, 0.3):
        stats.add("a", seconds)
    assert stats.window()["a"] == StageTotal(2, 0.4, 0.3)
    stats.add("a", 0.2)
    stats.add("b", 1.0)
    window = stats.window()
    assert window["a"].count == 1
    assert abs(window["a"].total - 0.2) < 1e-12
    assert window["a"].max == 0.2, "the maximum is the window's own"
    assert stats.window() == {}
    assert stats.cumulative()["a"].count == 3
    assert stats.cumulative()["a"].max == 0.3


def test_threads_lose_nothing() -> None:
    stats = ProfileStats()

    def work() -> None:
        for _ in range(5000):
            stats.add("s", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen = 0
    while any(t.is_alive() for t in threads):
        seen += stats.window().get("s", StageTotal(0, 0.0, 0.0)).count
    for thread in threads:
        thread.join()
    seen += stats.window().get("s", StageTotal(0, 0.0, 0.0)).count
    assert seen == 20000
    assert stats.cumulative()["s"] == StageTotal(20000, 20000.0, 1.0)


def test_spans_nest_and_survive_exceptions() -> None:
    stats = ProfileStats()
    try:
        with stats.span("outer"), stats.span("inner"):
            raise KeyError
    except KeyError:
        pass
    assert {s: t.count for s, t in stats.cumulative().items()} == {"outer": 1, "inner": 1}


def test_merge_adds_another_instance() -> None:
    a, b = ProfileStats(), ProfileStats()
    a.add("s", 1.0)
    b.add("s", 3.0)
    a.merge(b)
    a.merge({"t": StageTotal(2, 5.0, 4.0)})
    assert a.cumulative() == {"s": StageTotal(2, 4.0, 3.0), "t": StageTotal(2, 5.0, 4.0)}


def test_disabled_is_a_no_op() -> None:
    stats = ProfileStats(enabled=False)
    with stats.span("s"):
        stats.add("s", 1.0)
    stats.merge({"s": StageTotal(1, 1.0, 1.0)})
    assert stats.cumulative() == {}
    assert stats.window() == {}


def test_quantiles_are_exact_to_half_a_bucket_in_both_views() -> None:
    stats = ProfileStats()
    for i in range(1, 2001):
        stats.add("s", i * 1e-3)
    window = stats.window()["s"]
    assert abs(window.p50 / 1.0 - 1) < 0.03
    assert abs(window.p95 / 1.9 - 1) < 0.03
    for _ in range(600):
        stats.add("s", 1e-4)
    assert abs(stats.window()["s"].p95 / 1e-4 - 1) < 0.03, "the window's own spans only"
    assert stats.cumulative()["s"].p95 > 1.0


def test_memory_is_flat_over_many_spans_and_threads() -> None:
    stats = ProfileStats()

    def work(spans: int) -> None:
        for i in range(spans):
            stats.add(f"stage{i % 10}", 1e-5 * (1 + i % 100))

    def in_threads(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=work, args=(3000,))
            thread.start()
            thread.join()
            stats.window()

    tracemalloc.start()
    work(5000)
    in_threads(2)
    before = tracemalloc.get_traced_memory()[0]
    work(20_000)
    in_threads(10)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000
    assert sum(t.count for t in stats.cumulative().values()) == 61_000


def test_a_report_carries_everything_to_another_process() -> None:
    here, there = ProfileStats(), ProfileStats()
    for seconds in (0.1, 0.2, 0.4):
        here.add("s", seconds)
    there.absorb(json.loads(json.dumps(here.report(since=0.0))))
    here.add("s", 0.8)
    there.absorb(json.loads(json.dumps(here.report(since=0.0))))
    assert there.cumulative()["s"] == here.cumulative()["s"]
    assert there.cumulative()["s"].histogram == here.cumulative()["s"].histogram
    assert there.window()["s"].count == 4
    assert there.events()


def test_a_thread_reads_its_own_new_spans() -> None:
    stats = ProfileStats()
    wanted = frozenset({"s"})
    stats.take_own(wanted)
    seen = []
    for i in range(5000):
        stats.add("s", float(i))
        stats.add("other", 1.0)
        if i % 1999 == 0:  # more spans between two looks than the thread's lists hold
            seen += [seconds for _, seconds, _ in stats.take_own(wanted)]
    seen += [seconds for _, seconds, _ in stats.take_own(wanted)]
    assert seen == [float(i) for i in range(5000)]
    assert stats.take_own(wanted) == []


def test_threads_that_have_ended_leave_nothing_behind() -> None:
    """Also where the profiler is off, and nobody ever reads."""
    stats = ProfileStats()
    for _ in range(20):
        thread = threading.Thread(target=stats.add, args=("s", 1.0))
        thread.start()
        thread.join()
    assert len(stats._threads) <= 2
    assert stats.cumulative()["s"].count == 20
