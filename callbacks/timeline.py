"""The timeline of the last steps: a picture with one lane a process, and a Chrome trace of the same spans."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.pipeline.windows import PACK_STAGES
from dflash_lightning.profiling import STAGES, Event

Lanes = Mapping[str, Sequence[Event]]

# Blues and greens for the target, warm colours for the drafter, greys for waiting.
_COLOURS = {
    "target.load_batch": (120, 180, 220),
    "target.model_forward": (31, 119, 180),
    "target.pack_hidden": (44, 160, 44),
    "target.copy_to_host": (152, 223, 138),
    "target.cache_write": (0, 100, 0),
    "target.queue_put_wait": (200, 200, 200),
    "drafter.queue_wait": (190, 190, 190),
    "drafter.copy_to_device": (219, 219, 141),
    "drafter.forward": (255, 127, 14),
    "drafter.backward": (214, 39, 40),
    "drafter.optimizer_step": (148, 103, 189),
    "drafter.grad_norm_sync": (227, 119, 194),
    "drafter.metrics_sync": (247, 182, 210),
    "drafter.validation": (23, 190, 207),
    "drafter.checkpoint": (140, 86, 75),
    "drafter.acceptance": (0, 128, 128),
    "drafter.batch_start": (130, 130, 130),
    "drafter.in_step": (110, 110, 110),
    "drafter.between_steps": (90, 90, 90),
    "drafter.profile": (0, 0, 0),
    "dflash.block_layout": (188, 189, 34),
    "dflash.create_block_mask_swa": (255, 80, 160),
    "dflash.create_block_mask_full": (160, 0, 110),
    "dflash.layers": (255, 200, 120),
    "dflash.loss": (255, 235, 59),
}
_OTHER = (60, 60, 60)
_WIDTH, _LEFT, _LANE, _GAP, _TOP, _LINE = 1400, 150, 26, 8, 30, 16


def draw_timeline(lanes: Lanes, start: float, end: float) -> np.ndarray:
    """Picture [height, width, 3] uint8 of the spans between two times of the `perf_counter` clock."""
    from PIL import Image, ImageDraw  # comes with tensorboard

    stages = sorted({e[0] for events in lanes.values() for e in events}, key=_rank)
    legend_rows = -(-len(stages) // 5)
    height = _TOP + len(lanes) * (_LANE + _GAP) + _GAP + legend_rows * _LINE + _GAP
    image = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    scale = (_WIDTH - _LEFT - 10) / max(end - start, 1e-9)
    for tick in range(11):
        x = _LEFT + (_WIDTH - _LEFT - 10) * tick / 10
        draw.line([(x, _TOP - 6), (x, _TOP + len(lanes) * (_LANE + _GAP))], fill=(230, 230, 230))
        draw.text((x - 12, 8), f"{(end - start) * tick / 10:.3g}s", fill="black")
    y = _TOP
    for name, events in lanes.items():
        draw.text((8, y + 7), name, fill="black")
        draw.rectangle([_LEFT, y, _WIDTH - 10, y + _LANE], outline=(220, 220, 220))
        # Inner spans come last, as a strip over the span that holds them.
        for stage, seconds, ended in sorted(events, key=lambda e: e[0].startswith("dflash.")):
            left, right = max(ended - seconds, start), min(ended, end)
            if right <= left:
                continue
            inner = stage.startswith("dflash.")
            x0, x1 = _LEFT + (left - start) * scale, _LEFT + (right - start) * scale
            box = [x0, y + (_LANE * 2 // 3 if inner else 1), max(x1, x0 + 1), y + _LANE - 1]
            draw.rectangle(box, fill=_colour(stage))
        y += _LANE + _GAP
    for index, stage in enumerate(stages):
        x, row = 8 + index % 5 * (_WIDTH // 5), y + _GAP + index // 5 * _LINE
        draw.rectangle([x, row + 2, x + 10, row + 12], fill=_colour(stage))
        draw.text((x + 16, row), stage, fill="black")
    return np.asarray(image)


def write_chrome_trace(file: Path, lanes: Lanes) -> None:
    """The spans as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    events: list[dict[str, Any]] = []
    for pid, (name, spans) in enumerate(lanes.items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        for stage, seconds, ended in spans:
            # A worker's two threads overlap: spans of a track must nest.
            tid = 1 if stage in PACK_STAGES else 0
            begin = {"name": stage, "ph": "X", "pid": pid, "tid": tid, "cat": stage.split(".")[0]}
            events.append(begin | {"ts": (ended - seconds) * 1e6, "dur": seconds * 1e6})
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    partial.replace(file)


def _rank(stage: str) -> tuple[int, str]:
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)


def _colour(stage: str) -> tuple[int, int, int]:
    return _COLOURS.get(stage, _OTHER)
