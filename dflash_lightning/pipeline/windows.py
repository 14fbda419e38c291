"""Profile windows: what one holds, the scalars and the table made from it, and the file that keeps them.

A lane is one process: `producer0`, ..., `rank0`, .... Ranks run in lockstep, where a slow rank's wait shows as the
others' all-reduce time: the group's wait of a step is the maximum over ranks, its backward time the minimum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_lightning.profiling import StageTotal, format_table

PROFILE_FILE = "profile.jsonl"
# Host-clock spans of a rank's main thread that lie in no other span.
TOP_LEVEL = (
    "drafter.queue_wait",
    "drafter.forward",
    "drafter.backward",
    "drafter.optimizer_step",
    "drafter.grad_norm_sync",
    "drafter.metrics_sync",
    "drafter.validation",
    "drafter.checkpoint",
    "drafter.acceptance",
    "drafter.batch_start",
    "drafter.in_step",
    "drafter.between_steps",
    "drafter.profile",
)
OTHER = "drafter.other"
# What stops the training now and then: no part of a step.
PAUSES = ("drafter.validation", "drafter.checkpoint", "drafter.acceptance")
# A worker runs these in two threads, side by side.
FORWARD_STAGES = ("target.load_batch", "target.model_forward")
PACK_STAGES = ("target.pack_hidden", "target.copy_to_host", "target.cache_write")
_COMPILED = (
    "drafter.forward", "dflash.create_block_mask_swa", "dflash.create_block_mask_full",
    "target.model_forward",
)  # fmt: skip

Lane = dict[str, StageTotal]


@dataclass(frozen=True)
class Settings:
    """What decides how stage times become throughput. `producers` 0: the ranks produce in their own processes."""

    producers: int = 0
    ranks: int = 1
    queue_depth: int = 60
    min_ready: int = 1
    prefetch: int = 2
    reuse: int = 1


@dataclass(frozen=True)
class Window:
    """One profile window. Times in seconds; `tokens` and `batches` over all ranks."""

    number: int
    start: float  # since training began
    wall: float
    step: int  # trainer.global_step at its end
    lanes: dict[str, Lane]
    tokens: int
    batches: int
    queue_depth: int = 0
    settings: Settings = field(default_factory=Settings)
    group_steps: int = 0  # steps of which every rank's times are known
    group_wait: float = 0.0
    group_backward: float = 0.0
    warm_up: bool = False
    closed_by: str = "interval"  # or "end", "exception"

    def merged(self) -> dict[str, tuple[StageTotal, float]]:
        """Stage -> its total over all lanes, and its share of the wall time of the lanes that have it."""
        totals: dict[str, tuple[StageTotal, int]] = {}
        for lane in self.lanes.values():
            for stage, item in lane.items():
                old, lanes = totals.get(stage, (StageTotal(0, 0.0, 0.0), 0))
                totals[stage] = (old + item, lanes + 1)
        return {stage: (item, item.total / (self.wall * lanes)) for stage, (item, lanes) in totals.items()}

    def producers(self) -> list[Lane]:
        """The lanes that make batches, with the target or from its cache: producers, or ranks that do it themselves."""
        named = [lane for name, lane in self.lanes.items() if name.startswith("producer")]
        stages = {*FORWARD_STAGES, *PACK_STAGES}
        return named or [lane for lane in self.lanes.values() if not stages.isdisjoint(lane)]

    def target_utilization(self) -> float | None:
        """Busy share of the producers' busier thread; None where no process of this node produces."""
        lanes = self.producers()
        if not lanes:
            return None
        forward, pack = (sum(seconds(lane, stages) for lane in lanes) for stages in (FORWARD_STAGES, PACK_STAGES))
        # Inside the training process both stages share one thread.
        busy = max(forward, pack) if self.settings.producers else forward + pack
        # A batch's time is booked in the window in which it ends.
        return min(1.0, busy / (self.wall * len(lanes)))

    def wait_share(self) -> float:
        """The group's share of time that it waits for hidden states."""
        if self.group_steps:
            # The other ranks' newest steps may come with the next window: take the mean over those that are known.
            steps = self.batches / self.settings.ranks
            return min(1.0, self.group_wait / self.group_steps * steps / self.wall)
        return seconds(self.lanes.get("rank0", {}), ("drafter.queue_wait",)) / self.wall

    def pauses(self) -> float:
        """Seconds of rank 0 in validation, checkpoints and measurements of acceptance."""
        return seconds(self.lanes.get("rank0", {}), PAUSES)

    def coverage(self) -> float:
        """Share of rank 0's main thread that its top-level spans explain."""
        return seconds(self.lanes.get("rank0", {}), TOP_LEVEL) / self.wall

    def scalars(self) -> dict[str, float]:
        """The TensorBoard scalars of this window."""
        values: dict[str, float] = {}
        for stage, (item, share) in self.merged().items():
            values[f"profile/avg_ms/{stage}"] = item.mean * 1e3
            values[f"profile/max_ms/{stage}"] = item.max * 1e3
            values[f"profile/total_s/{stage}"] = item.total
            values[f"profile/share/{stage}"] = share
            values[f"profile/count/{stage}"] = item.count
        values["profile/coverage"] = self.coverage()
        values["pipeline/tokens_per_s"] = self.tokens / self.wall
        values["pipeline/queue_depth"] = self.queue_depth
        utilization = self.target_utilization()
        if utilization is not None:
            values["pipeline/target_utilization"] = utilization
        values["pipeline/drafter_wait_share"] = self.wait_share()
        return values

    def table(self) -> str:
        return format_table({stage: item for stage, (item, _) in self.merged().items()})

    def to_json(self) -> dict[str, Any]:
        lanes = {name: {s: t.to_json() for s, t in lane.items()} for name, lane in self.lanes.items()}
        return {**asdict(self), "lanes": lanes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Window:
        lanes = {name: {s: StageTotal.from_json(t) for s, t in lane.items()} for name, lane in data["lanes"].items()}
        return cls(**{**data, "lanes": lanes, "settings": Settings(**data["settings"])})


def seconds(lane: Lane, stages: Iterable[str]) -> float:
    """Time of `stages` together."""
    return sum(lane[stage].total for stage in stages if stage in lane)


def with_other(lane: Lane, wall: float, steps: int) -> Lane:
    """The lane of a rank with the time of its main thread that no span explains, a mean a step."""
    rest = max(0.0, wall - seconds(lane, TOP_LEVEL))
    return {**lane, OTHER: StageTotal(max(1, steps), rest, rest / max(1, steps))}


def holds_start_up(number: int, wall: float, lanes: dict[str, Lane]) -> bool:
    """Whether a window should not be judged: the first one, or one with a compilation in it."""
    if number == 0:
        return True

    def stands_out(lane: Lane, stage: str) -> bool:
        item = lane.get(stage)
        return item is not None and item.count > 2 and item.max > 10 * item.p50 and item.max > 0.05 * wall

    if any(stands_out(lane, stage) for lane in lanes.values() for stage in _COMPILED):
        return True
    # One rank's backward also holds the wait for the others, while rank 0 saves, say; compilation comes to all.
    ranks = [lane for name, lane in lanes.items() if name.startswith("rank")]
    return bool(ranks) and all(stands_out(lane, "drafter.backward") for lane in ranks)


def steady(windows: Sequence[Window]) -> list[Window]:
    """The windows that count: those without start-up or exception; all of them where no other is left."""
    kept = [w for w in windows if not w.warm_up and w.closed_by != "exception" and w.batches]
    return kept or [w for w in windows if w.batches] or list(windows)


def combine(windows: Sequence[Window]) -> Window:
    """One window over several."""
    assert windows
    lanes: dict[str, Lane] = {}
    for window in windows:
        for name, lane in window.lanes.items():
            into = lanes.setdefault(name, {})
            for stage, item in lane.items():
                into[stage] = into[stage] + item if stage in into else item
    last = windows[-1]
    return Window(
        number=last.number,
        start=windows[0].start,
        wall=sum(w.wall for w in windows),
        step=last.step,
        lanes=lanes,
        tokens=sum(w.tokens for w in windows),
        batches=sum(w.batches for w in windows),
        queue_depth=round(sum(w.queue_depth for w in windows) / len(windows)),
        settings=last.settings,
        group_steps=sum(w.group_steps for w in windows),
        group_wait=sum(w.group_wait for w in windows),
        group_backward=sum(w.group_backward for w in windows),
        warm_up=all(w.warm_up for w in windows),
        closed_by=last.closed_by,
    )


def append_window(folder: str | Path, window: Window) -> None:
    """Add a line to the run folder's profile."""
    file = Path(folder) / PROFILE_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(window.to_json(), separators=(",", ":")).encode() + b"\n"
    with file.open("a+b") as out:
        if out.tell():
            out.seek(-1, os.SEEK_END)
            # A run that was killed while it wrote: its half line must not swallow this one.
            line = line if out.read() == b"\n" else b"\n" + line
        out.write(line)


def read_windows(folder: str | Path) -> list[Window]:
    """Every whole line of a run folder's profile; after a resume only the last start's.

    Raises:
        FileNotFoundError: the folder holds no profile.
        ValueError: what it holds is none, or has no window yet.
    """
    file = Path(folder) / PROFILE_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder}: no {PROFILE_FILE}; give a run folder (trainer.default_root_dir) whose profile.profile_interval "
            "is not 0 and whose first window has ended"
        )
    windows: list[Window] = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError:  # a running or killed run: the line is not whole
            continue
        try:
            window = Window.from_json(data)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(f"{file}, line {number}: no profile window of this version ({error!r})") from error
        if window.number == 0:
            windows.clear()
        windows.append(window)
    if not windows:
        raise ValueError(f"{file}: holds no window yet")
    return windows
