"""StageProfilerCallback: the spans of every process as TensorBoard scalars, a window each profile interval."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from dflash_lightning.profiling import StageTotal, format_table, process_stats

_BUSY_STAGES = ("target.load_batch", "target.model_forward", "target.pack_hidden", "target.copy_to_host")


@dataclass
class Window:
    """Stage totals of one profile window by lane (this rank, each producer). Seconds."""

    wall: float
    lanes: dict[str, dict[str, StageTotal]]
    tokens: int
    queue_depth: int

    def merged(self) -> dict[str, tuple[StageTotal, float]]:
        """Stage -> its total over all lanes, and its share of the wall time of the lanes that have it."""
        totals: dict[str, tuple[StageTotal, int]] = {}
        for lane in self.lanes.values():
            for stage, item in lane.items():
                old, lanes = totals.get(stage, (StageTotal(0, 0.0, 0.0), 0))
                both = StageTotal(old.count + item.count, old.total + item.total, max(old.max, item.max))
                totals[stage] = (both, lanes + 1)
        return {stage: (item, item.total / (self.wall * lanes)) for stage, (item, lanes) in totals.items()}

    def target_utilization(self) -> float | None:
        """Busy share of the producers; None where production runs in the training process."""
        producers = [lane for name, lane in self.lanes.items() if name.startswith("producer")]
        if not producers:
            return None
        busy = sum(lane[s].total for lane in producers for s in _BUSY_STAGES if s in lane)
        return busy / (self.wall * len(producers))

    def scalars(self) -> dict[str, float]:
        """The TensorBoard scalars of this window."""
        values: dict[str, float] = {}
        for stage, (item, share) in self.merged().items():
            values[f"profile/avg_ms/{stage}"] = item.mean * 1e3
            values[f"profile/max_ms/{stage}"] = item.max * 1e3
            values[f"profile/total_s/{stage}"] = item.total
            values[f"profile/share/{stage}"] = share
            values[f"profile/count/{stage}"] = item.count
        values["pipeline/tokens_per_s"] = self.tokens / self.wall
        values["pipeline/queue_depth"] = self.queue_depth
        utilization = self.target_utilization()
        if utilization is not None:
            values["pipeline/target_utilization"] = utilization
        wait = self.lanes.get("rank0", {}).get("drafter.queue_wait")
        values["pipeline/drafter_wait_share"] = wait.total / self.wall if wait else 0.0
        return values


class StageProfilerCallback(Callback):
    """Writes the stage timings of trainer and producers to the logger at `trainer.global_step`.

    Args:
        profile_interval: seconds between two windows; None takes `DFLASH_PROFILE_INTERVAL`, else 60; 0 turns it off.
    """

    def __init__(self, profile_interval: float | None = None) -> None:
        if profile_interval is None:
            text = os.environ.get("DFLASH_PROFILE_INTERVAL", "60")
            try:
                profile_interval = float(text)
            except ValueError:
                raise ValueError(f"DFLASH_PROFILE_INTERVAL={text!r}: give seconds") from None
        if profile_interval < 0:
            raise ValueError(f"profile_interval={profile_interval}: seconds, 0 turns it off")
        self.profile_interval = profile_interval
        self.last_profile_log = 0.0
        self._tokens = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The clock starts with training, so that the first window is as long as the others.
        self.last_profile_log = time.perf_counter()
        self._tokens = 0
        process_stats().window()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += getattr(batch, "num_tokens", 0)
        if self.profile_interval and time.perf_counter() - self.last_profile_log >= self.profile_interval:
            self._close_window(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.profile_interval and self._tokens:
            self._close_window(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.profile_interval and self._tokens:
            self._close_window(trainer)

    def _close_window(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        wall, self.last_profile_log = now - self.last_profile_log, now
        lanes = {f"rank{trainer.global_rank}": process_stats().window()}
        data = getattr(trainer, "datamodule", None)
        source = getattr(data, "source", None)
        if source is not None:
            lanes.update({name: stats.window() for name, stats in source.lanes().items()})
        depth = data.queue_state()[0] if data is not None and hasattr(data, "queue_state") else 0
        window = Window(wall, lanes, self._tokens * trainer.world_size, depth)
        self._tokens = 0
        if not trainer.is_global_zero or trainer.logger is None:
            return
        trainer.logger.log_metrics(window.scalars(), step=trainer.global_step)
        if isinstance(trainer.logger, TensorBoardLogger):
            table = format_table({stage: item for stage, (item, _) in window.merged().items()})
            trainer.logger.experiment.add_text("profile/table", f"```\n{table}\n```", trainer.global_step)
