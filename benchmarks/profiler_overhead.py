"""What a span costs: enabled, disabled, and beside Lightning's SimpleProfiler in the same run.

Rounds of the three alternate, so that a noisy machine disturbs them alike; the best round of each
counts, as in `timeit`. Also: memory over 100,000 spans of ten stages.

    python benchmarks/profiler_overhead.py [--spans 10000] [--rounds 41]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning.pytorch.profilers import SimpleProfiler

from dflash_lightning.profiling import ProfileStats


def microseconds(make: Callable[[str], AbstractContextManager], spans: int) -> float:
    """Time of one empty span, the loop included."""
    started = time.perf_counter()
    for _ in range(spans):
        with make("drafter.forward"):
            pass
    return (time.perf_counter() - started) / spans * 1e6


def memory_growth() -> int:
    """Bytes that 100,000 spans after the first 20,000 add."""
    stats = ProfileStats()

    def work(spans: int) -> None:
        for i in range(spans):
            stats.add(f"stage{i % 10}", 1e-5 * (1 + i % 100))

    tracemalloc.start()
    work(20_000)
    before = tracemalloc.get_traced_memory()[0]
    work(100_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    times: dict[str, list[float]] = {"enabled": [], "disabled": [], "simple": []}
    enabled, disabled = ProfileStats(), ProfileStats(enabled=False)
    for _ in range(args.rounds):
        simple = SimpleProfiler()
        times["simple"].append(microseconds(simple.profile, args.spans))
        times["enabled"].append(microseconds(enabled.span, args.spans))
        times["disabled"].append(microseconds(disabled.span, args.spans))
    best = {name: min(values) for name, values in times.items()}
    for name, value in best.items():
        print(f"{name:<10} {value:.3f} us a span (median {statistics.median(times[name]):.3f})")
    ratio = statistics.median(e / s for e, s in zip(times["enabled"], times["simple"], strict=True))
    print(
        "RESULT",
        json.dumps(
            {
                "enabled_us": round(best["enabled"], 3),
                "disabled_us": round(best["disabled"], 3),
                "vs_simple_profiler": round(ratio, 3),
                "memory_growth_bytes": memory_growth(),
            }
        ),
    )


if __name__ == "__main__":
    main()
