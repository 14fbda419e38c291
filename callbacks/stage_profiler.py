"""StageProfilerCallback: the spans of every process as a window each profile interval."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from dflash_lightning.callbacks.panels import console_line, write_layout, write_texts
from dflash_lightning.callbacks.timeline import draw_timeline, write_chrome_trace
from dflash_lightning.pipeline.rank_steps import GroupSteps, OwnSteps
from dflash_lightning.pipeline.verdict import Verdict, judge
from dflash_lightning.pipeline.windows import (
    PROFILE_FILE,
    TOP_LEVEL,
    Settings,
    Window,
    append_window,
    holds_start_up,
    seconds,
    with_other,
)
from dflash_lightning.profiling import (
    Event,
    ProfileStats,
    StageTotal,
    _prof_add,
    main_span,
    mirror_alone,
    process_stats,
)

TRACE_FILE = "trace.json"
_WINDOWS_KEPT = 30  # the verdict is over these
_RANK_REPORT_SECONDS = 1.0
# How long rank 0 waits at the end for the other ranks' last spans; they end within the same step.
_LAST_REPORTS_SECONDS = 1.0
# Verdict and picture may take so much of the time.
_EXTRAS_SHARE = 0.002


class StageProfilerCallback(Callback):
    """Writes the stage timings of trainer and producers at `trainer.global_step`: scalars, table, verdict, timeline.

    Every window is also a line of `profile.jsonl` in the run folder, which `dflash profile` reads.

    Args:
        profile_interval: seconds between two windows; None takes `DFLASH_PROFILE_INTERVAL`, else 60; 0 turns it off.
        timeline_steps: steps in the timeline picture.
        chrome_trace: also write the newest spans to `trace.json` in the run folder, for Perfetto.
    """

    def __init__(
        self, profile_interval: float | None = None, timeline_steps: int = 8, chrome_trace: bool = False
    ) -> None:
        option, given = "profile_interval", profile_interval
        if given is None:
            option, given = "DFLASH_PROFILE_INTERVAL", os.environ.get("DFLASH_PROFILE_INTERVAL") or "60"
        try:
            profile_interval = float(given)
        except ValueError:
            profile_interval = math.nan
        if not 0 <= profile_interval < math.inf:
            raise ValueError(f"{option}={given}: give seconds; 0 turns it off")
        if timeline_steps < 1:
            raise ValueError(f"timeline_steps={timeline_steps}: at least 1")
        self.profile_interval = profile_interval
        self.timeline_steps = timeline_steps
        self.chrome_trace = chrome_trace
        self.last_profile_log = 0.0
        self._running = False

    # Lightning's hooks.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if sum(isinstance(callback, StageProfilerCallback) for callback in callbacks) > 1:
            raise ValueError(
                "trainer.callbacks: a second StageProfilerCallback would take the first one's spans; `dflash fit` "
                "brings one along, whose options are profile.*"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.profile_interval:
            return
        self._source = getattr(getattr(trainer, "datamodule", None), "source", None)
        self._number = 0
        self._tokens = self._batches = 0
        self._windows: deque[Window] = deque(maxlen=_WINDOWS_KEPT)
        self._ends: deque[float] = deque(maxlen=self.timeline_steps + 1)
        self._group = GroupSteps([trainer.global_rank, *self._rank_profiles()])
        self._extras_cost, self._extras_end = 0.0, 0.0
        self._step_logged = trainer.global_step
        self._file_failed = False
        self._undo_spans = _span_checkpoints(trainer)
        for writer in _tensorboards(trainer):
            write_layout(writer)
        process_stats().window()
        # The clock starts with training, so that the first window is as long as the others.
        self.last_profile_log = self._began = self._last_report = time.perf_counter()
        self._steps = OwnSteps()
        self._ends.append(self._began)
        self._running = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._running:
            return
        now = time.perf_counter()
        self._tokens += getattr(batch, "num_tokens", 0)
        self._batches += 1
        self._steps.end_batch()
        self._ends.append(now)
        if not trainer.is_global_zero:
            if now - self._last_report >= min(_RANK_REPORT_SECONDS, self.profile_interval / 4):
                self._report(pl_module, finished=False)
        # One point a window: never two at one global step.
        elif now - self.last_profile_log >= self.profile_interval and trainer.global_step > self._step_logged:
            self._close_window(trainer, pl_module, "interval")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running:
            self._steps.pause()
            self._mirrored = mirror_alone("drafter.validation")
            self._mirrored.__enter__()
            self._validation = (time.perf_counter(), seconds(process_stats().cumulative(), TOP_LEVEL))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running:
            started, before = self._validation
            inside = seconds(process_stats().cumulative(), TOP_LEVEL) - before
            _prof_add("drafter.validation", max(0.0, time.perf_counter() - started - inside))
            self._mirrored.__exit__(None, None, None)
            self._steps.forget()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "end")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._finish(trainer, pl_module, "exception")
        except Exception as error:  # the reason why the run ends must not be lost behind it
            rank_zero_warn(f"the last profile window could not be written: {type(error).__name__}: {error}")

    # Windows.

    def _finish(self, trainer: Trainer, pl_module: LightningModule, how: str) -> None:
        """The last window, once."""
        if not self._running:
            return
        self._running = False
        self._undo_spans()
        if not trainer.is_global_zero:
            self._report(pl_module, finished=True)
            return
        deadline = time.monotonic() + (_LAST_REPORTS_SECONDS if how == "end" else 0.2)
        while time.monotonic() < deadline and not all(p.finished for p in self._rank_profiles().values()):
            time.sleep(0.01)
        self._close_window(trainer, pl_module, how)

    def _report(self, pl_module: LightningModule, finished: bool) -> None:
        """Rank above 0: give the spans to local rank 0."""
        _collect_device_times(pl_module)
        send = getattr(self._source, "send_profile", None)
        steps = self._steps.take()
        if send is not None:
            since, self._last_report = self._last_report, time.perf_counter()
            send(process_stats().report(since), steps, finished)

    def _rank_profiles(self) -> dict[int, Any]:
        found = getattr(self._source, "rank_profiles", None)
        return found() if found is not None else {}

    def _close_window(self, trainer: Trainer, pl_module: LightningModule, how: str) -> None:
        _collect_device_times(pl_module)
        now = time.perf_counter()
        start, wall, self.last_profile_log = self.last_profile_log, now - self.last_profile_log, now
        own = f"rank{trainer.global_rank}"
        lanes = {own: with_other(process_stats().window(), wall, self._batches)}
        if self._source is not None:
            lanes.update({name: stats.window() for name, stats in self._source.lanes().items()})
        self._group.add(self._steps.take())
        for rank, profile in self._rank_profiles().items():
            lane = profile.stats.window()
            if lane:
                lanes[f"rank{rank}"] = lane
            self._group.add(profile.take_steps())
        steps, wait, backward = self._group.take()
        data = getattr(trainer, "datamodule", None)
        window = Window(
            number=self._number,
            start=start - self._began,
            wall=wall,
            step=trainer.global_step,
            lanes=lanes,
            tokens=self._tokens * trainer.world_size,
            batches=self._batches * trainer.world_size,
            queue_depth=data.queue_state()[0] if data is not None and hasattr(data, "queue_state") else 0,
            settings=_settings(trainer),
            group_steps=steps,
            group_wait=wait,
            group_backward=backward,
            warm_up=holds_start_up(self._number, wall, lanes),
            closed_by=how,
        )
        self._number += 1
        self._tokens = self._batches = 0
        fresh, self._step_logged = window.step > self._step_logged, window.step
        self._windows.append(window)
        self._write(trainer, pl_module, window, fresh)
        _prof_add("drafter.profile", time.perf_counter() - now)
        self._steps.forget()

    def _write(self, trainer: Trainer, pl_module: LightningModule, window: Window, fresh: bool) -> None:
        """`fresh`: the window ends at another step than the one before."""
        try:
            append_window(trainer.default_root_dir, window)
        except OSError as error:  # a full disk: training must not end for its profile
            if not self._file_failed:
                rank_zero_warn(f"{PROFILE_FILE} misses windows from now on: {error}")
            self._file_failed = True
        if window.batches:
            trainer.print(console_line(window, getattr(pl_module, "last_logged", {})))
        # A last window without a whole step (validation, a checkpoint) would be a second point at the one before.
        if window.batches and fresh:
            for logger in trainer.loggers:
                logger.log_metrics(window.scalars(), step=window.step)
        started = time.perf_counter()
        due = started - self._extras_end >= self._extras_cost / _EXTRAS_SHARE
        if not due and window.closed_by == "interval":
            return
        if self.chrome_trace:
            write_chrome_trace(Path(trainer.default_root_dir) / TRACE_FILE, self._events(trainer, 0.0))
        writers = _tensorboards(trainer)
        if writers:
            since, until = self._ends[0], self._ends[-1]
            picture = draw_timeline(self._events(trainer, since), since, until) if until > since else None
            since_start, verdict = self._since_start(), _verdict(self._windows)
            for writer in writers:
                write_texts(writer, window, since_start, verdict)
                if picture is not None:
                    writer.add_image("profile/timeline", picture, window.step, dataformats="HWC")
                writer.flush()
        self._extras_end = time.perf_counter()
        self._extras_cost = self._extras_end - started

    def _since_start(self) -> dict[str, StageTotal]:
        """Every stage of all processes since they started."""
        lanes = [process_stats(), *(p.stats for p in self._rank_profiles().values())]
        lanes += self._source.lanes().values() if self._source is not None else ()
        together = ProfileStats()
        for stats in lanes:
            together.merge(stats)
        return together.cumulative()

    def _events(self, trainer: Trainer, since: float) -> dict[str, list[Event]]:
        """The newest spans: a lane a producer, this rank's main thread, its loader, and the other ranks."""
        lanes: dict[str, list[Event]] = {}
        if self._source is not None:
            for name, stats in self._source.lanes().items():
                lanes[name] = [e for found in stats.events(since).values() for e in found]
        own = f"rank{trainer.global_rank}"
        for thread, found in process_stats().events(since).items():
            name = own if thread == threading.current_thread().name else f"{own} loader"
            lanes.setdefault(name, []).extend(found)
        for rank, profile in self._rank_profiles().items():
            lanes[f"rank{rank}"] = [e for found in profile.stats.events(since).values() for e in found]
        return lanes


def _tensorboards(trainer: Trainer) -> list[Any]:
    """The TensorBoard writers of rank 0."""
    return [
        logger.experiment
        for logger in trainer.loggers
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero
    ]


def _collect_device_times(pl_module: LightningModule) -> None:
    collect = getattr(pl_module, "collect_device_times", None)
    if collect is not None:
        collect()


def _verdict(windows: deque[Window]) -> Verdict | None:
    try:
        return judge(windows)
    except ValueError:  # nothing produced or nothing trained in them
        return None


def _settings(trainer: Trainer) -> Settings:
    data = getattr(trainer, "datamodule", None)
    default = Settings()
    return Settings(
        producers=len(getattr(data, "target_devices", ())) * trainer.num_nodes,
        ranks=trainer.world_size,
        queue_depth=getattr(data, "queue_depth", default.queue_depth) * trainer.num_nodes,
        min_ready=getattr(data, "min_ready", default.min_ready),
        prefetch=getattr(data, "prefetch", default.prefetch),
        reuse=getattr(data, "reuse", default.reuse),
    )


def _span_checkpoints(trainer: Trainer) -> Callable[[], None]:
    """Time every checkpoint that anything saves under `drafter.checkpoint`; returns what undoes it."""
    save, before = trainer.save_checkpoint, vars(trainer).get("save_checkpoint")

    def timed(*args: Any, **kwargs: Any) -> None:
        with main_span("drafter.checkpoint"):
            save(*args, **kwargs)

    def undo() -> None:
        if before is None:
            vars(trainer).pop("save_checkpoint", None)
        else:
            trainer.save_checkpoint = before

    trainer.save_checkpoint = timed
    return undo
