"""What a span costs: enabled, disabled, and beside Lightning's SimpleProfiler in the same run.

Rounds of the three alternate, so that a noisy machine disturbs them alike; the best round of each
counts, as in `timeit`. Also: memory over 100,000 spans of ten stages.

`--run` adds what profiling costs a finished run, from its own counters: spans a step times their cost, and the
callback's time. `--pairs` trains the quickstart so many times with profiling on and off, in turns, and compares the
step times.

    python benchmarks/profiler_overhead.py [--spans 10000] [--rounds 41] [--run runs/quickstart] [--pairs 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

from lightning.pytorch.profilers import SimpleProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.pipeline.rank_steps import OwnSteps
from dflash_lightning.pipeline.windows import combine, read_windows, steady
from dflash_lightning.profiling import ProfileStats, span


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


def end_batch_microseconds(batches: int = 5000) -> float:
    """What the callback does at the end of every batch, with the spans of a common step."""
    steps, spent = OwnSteps(), 0.0
    for _ in range(batches):
        for stage in ("queue_wait", "forward", "backward", "optimizer_step", "metrics_sync", "grad_norm_sync"):
            with span(f"drafter.{stage}"):
                pass
        started = time.perf_counter()
        steps.end_batch()
        spent += time.perf_counter() - started
        steps.take()
    return spent / batches * 1e6


def share_of_run(folder: str, span_us: float) -> dict[str, float]:
    """What profiling costs rank 0 of a run, from the counters of its steady windows, as a share of its steps' time."""
    window = combine(steady(read_windows(folder)))
    lane, steps = window.lanes["rank0"], window.batches / window.settings.ranks
    spans = sum(item.count for item in lane.values()) / steps
    callback = lane["drafter.profile"].total / steps * 1e6 if "drafter.profile" in lane else 0.0
    cost = spans * span_us + callback + end_batch_microseconds()
    step = window.wall / steps
    print(
        f"{folder}: {spans:.1f} spans a step, {cost / 1e3:.2f} ms of a step's {step * 1e3:.0f} ms; coverage "
        f"{window.coverage():.2%}"
    )
    return {
        "run_spans_a_step": round(spans, 1),
        "run_step_ms": round(step * 1e3, 2),
        "run_share": round(cost / 1e6 / step, 6),
        "run_coverage": round(window.coverage(), 4),
    }


def step_seconds(interval: float, steps: int) -> float:
    """Median time between two steps of a quickstart run with this profile interval."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dflash_lightning", "fit", "--config", "configs/quickstart.yaml"]
        command += ["--trainer.default_root_dir", folder, "--trainer.max_steps", str(steps)]
        command += ["--profile.profile_interval", str(interval)]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).resolve().parent.parent)
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        times = [event.wall_time for event in events.Scalars("train/loss")]
    return statistics.median(b - a for a, b in pairwise(times[3:]))


def pairs(count: int, steps: int) -> dict[str, object]:
    """Relative step time with profiling on, of each pair and in the middle."""
    ratios = []
    for number in range(count):
        order = (2.0, 0.0) if number % 2 else (0.0, 2.0)
        seconds = {interval: step_seconds(interval, steps) for interval in order}
        ratios.append(round(seconds[2.0] / seconds[0.0], 4))
        print(f"pair {number}: {seconds[2.0]:.3f} s a step with profiling, {seconds[0.0]:.3f} s without", flush=True)
    return {"paired_ratios": ratios, "paired_median": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--run", default=None, help="a run folder with a profile")
    parser.add_argument("--pairs", type=int, default=0, help="quickstart runs with profiling on and off")
    parser.add_argument("--steps", type=int, default=30, help="steps of each of them")
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
    result: dict[str, object] = {
        "enabled_us": round(best["enabled"], 3),
        "disabled_us": round(best["disabled"], 3),
        "vs_simple_profiler": round(ratio, 3),
        "memory_growth_bytes": memory_growth(),
    }
    if args.run:
        result.update(share_of_run(args.run, best["enabled"]))
    if args.pairs:
        result.update(pairs(args.pairs, args.steps))
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
