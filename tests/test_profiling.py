"""ProfileStats: windows, threads, merging, the disabled state."""

from __future__ import annotations

import threading

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
