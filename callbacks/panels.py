"""What a profile window looks like to a person: TensorBoard panels, texts and the console line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lightning.pipeline.verdict import Verdict
from dflash_lightning.pipeline.windows import Window
from dflash_lightning.profiling import StageTotal, format_table

LAYOUT = {
    "stages": {
        "mean of every stage (ms)": ["Multiline", [r"profile/avg_ms/.*"]],
        "maximum of every stage (ms)": ["Multiline", [r"profile/max_ms/.*"]],
        "share of wall time": ["Multiline", [r"profile/share/.*"]],
    },
    "pipeline": {
        "queue of hidden states": ["Multiline", [r"pipeline/queue_depth"]],
        "throughput (tokens/s)": ["Multiline", [r"pipeline/tokens_per_s"]],
        "producers busy, drafters waiting": [
            "Multiline",
            [r"pipeline/target_utilization", r"pipeline/drafter_wait_share"],
        ],
    },
}


def write_layout(writer: Any) -> None:
    """The custom-scalars page; call once a run, on rank 0."""
    writer.add_custom_scalars(LAYOUT)


def write_texts(writer: Any, window: Window, since_start: Mapping[str, StageTotal], verdict: Verdict | None) -> None:
    """Stage tables (of the window, and since the start) and verdict at the window's step."""
    marked = " (warm-up)" if window.warm_up else ""
    head = f"window {window.number}{marked}, {window.wall:.1f} s, coverage {window.coverage():.1%}"
    tables = f"{head}\n```\n{window.table()}\n```\nsince the start\n```\n{format_table(since_start)}\n```"
    writer.add_text("profile/table", tables, window.step)
    if verdict is not None:
        writer.add_text("profile/verdict", f"```\n{verdict.text()}\n```", window.step)


def console_line(window: Window, logged: Mapping[str, float]) -> str:
    """`[12m] step 340 | 14.5K tok/s | loss 2.31 | accept 3.4 | q_hs 9/60 | wait 21%`"""
    parts = [f"[{_age(window.start + window.wall)}] step {window.step}"]
    parts.append(f"{_short(window.tokens / window.wall)} tok/s")
    if "train/loss" in logged:
        parts.append(f"loss {logged['train/loss']:.2f}")
    if "train/acceptance_length" in logged:
        parts.append(f"accept {logged['train/acceptance_length']:.1f}")
    if window.settings.producers:
        parts.append(f"q_hs {window.queue_depth}/{window.settings.queue_depth}")
    parts.append(f"wait {window.wait_share():.0%}")
    return " | ".join(parts) + (" | warm-up" if window.warm_up else "")


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = int(seconds // 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _short(rate: float) -> str:
    for unit, size in (("M", 1e6), ("K", 1e3)):
        if rate >= size:
            return f"{rate / size:.1f}{unit}"
    return f"{rate:.0f}"
