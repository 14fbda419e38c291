"""Does the planner foresee what other settings do? Measured: one replay of the reference profile with 5 producers and 3
ranks. Predicted from its window and then replayed: (6, 2), (4, 3) and (5, 1) producers and ranks.

Also: the verdicts of the replays, and how far measured stage means are from the injected ones.

    python benchmarks/planner.py [--batches 240] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

# A fifth of the replay's default speed: an all-reduce (1-2 ms on this machine's cores) stays small beside it.
os.environ.setdefault("DFLASH_REPLAY_SLOWER", "5")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import pipeline_replay as reference  # noqa: E402
from dflash_lightning.pipeline.planner import measure, predict  # noqa: E402
from dflash_lightning.pipeline.verdict import judge  # noqa: E402
from dflash_lightning.pipeline.windows import Window  # noqa: E402

CASES = ((6, 2), (4, 3), (5, 1))
SHAPE = {"megabytes": 2, "queue_depth": 60, "min_ready": 1}


def stage_errors(window: Window) -> dict[str, float]:
    """Measured over injected stage means, minus one; the drafter's backward by the minimum rule."""
    injected = {
        "target.model_forward": reference.FORWARD,
        "target.pack_hidden": reference.PACK,
        "drafter.forward": reference.DRAFTER_FORWARD,
    }
    merged = window.merged()
    errors = {stage: merged[stage][0].mean / seconds - 1 for stage, seconds in injected.items()}
    errors["drafter.backward"] = window.group_backward / window.group_steps / reference.DRAFTER_BACKWARD - 1
    return {stage: round(error, 4) for stage, error in errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    _, base = reference.replay_with_window(batches=args.batches, producers=5, ranks=3, **SHAPE)
    print(
        f"measured (5, 3): {base.tokens / base.wall:,.0f} tokens/s\n{judge([base]).text()}\n{base.table()}", flush=True
    )
    measured = measure(base)
    errors, verdicts, stages = [], {"5,3": judge([base]).kind}, {"5,3": stage_errors(base)}
    for producers, ranks in CASES:
        predicted = predict(measured, replace(base.settings, producers=producers, ranks=ranks))
        runs = [
            reference.replay_with_window(batches=args.batches, producers=producers, ranks=ranks, **SHAPE)
            for _ in range(args.repeats)
        ]
        seen = statistics.median(figures["tokens_per_s"] for figures, _ in runs)
        window = runs[-1][1]
        errors.append(round(predicted.tokens_per_s / seen - 1, 4))
        verdicts[f"{producers},{ranks}"] = judge([window]).kind
        stages[f"{producers},{ranks}"] = stage_errors(window)
        print(
            f"({producers}, {ranks}): predicted {predicted.tokens_per_s:,.0f} tokens/s and {predicted.wait_share:.1%} "
            f"waiting, measured {seen:,.0f} and {window.wait_share():.1%}; {judge([window]).kind}",
            flush=True,
        )
    print("RESULT", json.dumps({"errors": errors, "verdicts": verdicts, "stage_errors": stages}))


if __name__ == "__main__":
    main()
