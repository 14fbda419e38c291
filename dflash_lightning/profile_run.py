"""`dflash profile`: stage table and verdict of a finished or running run, and predictions for other settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from dflash_lightning.pipeline.planner import measure, predict
from dflash_lightning.pipeline.verdict import judge
from dflash_lightning.pipeline.windows import Settings, Window, combine, read_windows, steady
from dflash_lightning.profiling import STAGES

# As the options are called in the configuration -> as the planner calls them.
_KEYS = {
    "target_devices": "producers",
    "devices": "ranks",
    "queue_depth": "queue_depth",
    "min_ready": "min_ready",
    "prefetch": "prefetch",
    "reuse": "reuse",
}


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
    verdict = judge(windows)
    shown = {"verdict": verdict.to_json(), "settings": asdict(window.settings), "stages": _stages(window)}
    prediction, change = None, 0.0
    if args.what_if:
        settings, means = parse_what_if(args.what_if, window.settings)
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
    print(f"\n{verdict.text()}")
    if prediction is not None:
        print(
            f"\nwith {' '.join(args.what_if)}: {prediction.tokens_per_s:,.0f} tokens/s ({change:+.1%}), drafters wait "
            f"{prediction.wait_share:.0%}, producers busy {prediction.target_utilization:.0%}"
        )
        print("producers and drafters are taken to have devices of their own")
    return 0


def parse_what_if(pairs: Sequence[str], now: Settings) -> tuple[Settings, dict[str, float]]:
    """KEY=VALUE pairs as settings, and as means of stages.

    Raises:
        ValueError: an unknown key, or a value that is not a number of the right kind.
    """
    changed: dict[str, int] = {}
    means: dict[str, float] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        key = key.strip().removeprefix("data.").removeprefix("trainer.")
        try:
            if key in _KEYS:
                changed[_KEYS[key]] = int(text)
            elif key in STAGES:
                means[key] = float(text)
            else:
                raise ValueError(f"--what-if {pair}: unknown key; use {', '.join(_KEYS)} or a stage of the table")
        except ValueError as error:
            if str(error).startswith("--what-if"):
                raise
            raise ValueError(f"--what-if {pair}: give a number after {key}=") from None
    settings = replace(now, **changed)
    least = {"producers": 0}
    for name, value in asdict(settings).items():
        if value < least.get(name, 1):
            key = next(k for k, n in _KEYS.items() if n == name)
            raise ValueError(f"--what-if {key}={value}: at least {least.get(name, 1)}")
    if settings.producers and settings.queue_depth < settings.ranks:
        raise ValueError(f"--what-if queue_depth={settings.queue_depth}: {settings.ranks} ranks need a slot each")
    if any(mean < 0 for mean in means.values()):
        raise ValueError("--what-if: a stage's mean is at least 0 seconds")
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
