"""Progress bar that shows the pipeline: tokens/s, loss, acceptance length, queue depth."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

# A rate over less than this is noise.
_RATE_SECONDS = 2.0


class PipelineProgressBar(TQDMProgressBar):
    """TQDM bar that takes its values when it is drawn: nothing is read from the device for it.

    Loss and acceptance length are those of the last logged step.

    Args:
        refresh_rate: batches between two redraws.
    """

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._tokens = 0
        self._since = 0.0
        self._rate = 0.0

    def on_train_start(self, *args: Any) -> None:
        self._tokens = 0
        self._since = time.monotonic()
        super().on_train_start(*args)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += getattr(batch, "num_tokens", 0)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        now = time.monotonic()
        if now - self._since > _RATE_SECONDS:
            self._rate = self._tokens * trainer.world_size / (now - self._since)
            self._tokens, self._since = 0, now
        metrics: dict[str, Any] = {"tok/s": f"{self._rate:,.0f}"}
        last = getattr(pl_module, "last_logged", {})
        for key, name in (("train/loss", "loss"), ("train/acceptance_length", "accept")):
            if key in last:
                metrics[name] = f"{last[key]:.3f}"
        queue_state = getattr(getattr(trainer, "datamodule", None), "queue_state", None)
        if queue_state is not None:
            metrics["q_hs"] = "{}/{}".format(*queue_state())
        return metrics
