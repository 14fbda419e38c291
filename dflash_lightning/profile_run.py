"""`dflash profile`: stage table and verdict of a finished or running run, and predictions for other settings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Container, Sequence
from dataclasses import asdict, replace
from typing import Any

from dflash_lightning.pipeline.planner import CHANGEABLE, measure, predict
from dflash_lightning.pipeline.verdict import judge
from dflash_lightning.pipeline.windows import Settings, Window, combine, read_windows, steady

# As the options are called in the configuration -> as the planner calls them.
_KEYS = {
    "target_devices": "producers",
    "devices": "ranks",
    "queue_depth": "queue_depth",
    "min_ready": "min_ready",
    "prefetch": "prefetch",
    "reuse": "reuse",
}
_MOST = 10_000  # of any count


def main(argv: list[str]) -> int:
    """Entry point of `dflash profile`."""
    parser = argparse.ArgumentParser(prog="dflash profile", description=__doc__)
    parser.add_argument("run_dir", help="run folder (trainer.default_root_dir)")
    parser.add_argument(
        "--what-if",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help=f"predict other settings: {', '.join(_KEYS)} (counts), or a stage and its mean in seconds",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    windows = read_windows(args.run_dir)
    window = combine(steady(windows))
    shown: dict[str, Any] = {"verdict": None, "settings": asdict(window.settings), "stages": _stages(window)}
    try:
        verdict = judge(windows)
        shown["verdict"], said = verdict.to_json(), verdict.text()
    except ValueError as error:
        shown["reason"], said = str(error), f"no verdict: {error}"
    prediction, change = None, 0.0
    if args.what_if:
        if shown["verdict"] is None:
            raise ValueError(f"--what-if: nothing to predict from, {shown['reason']}")
        settings, means = parse_what_if(args.what_if, window.settings, window.merged())
        prediction = predict(measure(window, means=means), settings)
        now = predict(measure(window), window.settings)
        change = prediction.tokens_per_s / now.tokens_per_s - 1
        shown["what_if"] = {"settings": asdict(settings), "means": means, **asdict(prediction), "change": change}
        shown["model_now"] = asdict(now)
    if args.json:
        print(json.dumps(shown))
        return 0
    print(f"{len(windows)} windows, {sum(w.warm_up for w in windows)} of them warm-up; {window.wall:.0f} s counted\n")
    print(window.table())
    print(f"\n{said}")
    if prediction is not None:
        print(
            f"\nwith {' '.join(args.what_if)}: {prediction.tokens_per_s:,.0f} tokens/s ({change:+.1%}), drafters wait "
            f"{prediction.wait_share:.0%}, producers busy {prediction.target_utilization:.0%}"
        )
        print("producers and drafters are taken to have devices of their own")
    return 0


def parse_what_if(pairs: Sequence[str], now: Settings, stages: Container[str]) -> tuple[Settings, dict[str, float]]:
    """KEY=VALUE pairs as settings, and as means of those of the run's `stages` that are causes and not effects.

    Raises:
        ValueError: an unknown key, or a value that is not a number of the right kind; the message names the pair.
    """
    changed: dict[str, int] = {}
    means: dict[str, float] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        key = key.strip().removeprefix("data.").removeprefix("trainer.")
        if key not in _KEYS and not (key in CHANGEABLE and key in stages):
            usable = ", ".join(stage for stage in CHANGEABLE if stage in stages)
            raise ValueError(f"--what-if {pair}: unknown key; use {', '.join(_KEYS)}, or a stage: {usable}")
        try:
            value = int(text) if key in _KEYS else float(text)
        except ValueError:
            raise ValueError(f"--what-if {pair}: give a number after {key}=") from None
        if isinstance(value, float):
            if not 0 <= value < math.inf:
                raise ValueError(f"--what-if {pair}: a stage's mean is at least 0 seconds, and finite")
            means[key] = value
            continue
        least = 0 if _KEYS[key] == "producers" else 1
        if not least <= value <= _MOST:
            raise ValueError(f"--what-if {pair}: {least} to {_MOST}")
        changed[_KEYS[key]] = value
    settings = replace(now, **changed)
    if settings.producers and settings.queue_depth < settings.ranks:
        raise ValueError(f"--what-if queue_depth={settings.queue_depth}: {settings.ranks} ranks need a slot each")
    return settings, means


def _stages(window: Window) -> dict[str, dict[str, float]]:
    return {
        stage: {
            "count": item.count,
            "mean_ms": item.mean * 1e3,
            "p50_ms": item.p50 * 1e3,
            "p95_ms": item.p95 * 1e3,
            "max_ms": item.max * 1e3,
            "total_s": item.total,
            "share": share,
        }
        for stage, (item, share) in sorted(window.merged().items(), key=lambda pair: -pair[1][0].total)
    }
