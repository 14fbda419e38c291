"""The callback that keeps the resume cursor, and Lightning's own progress, in step with what was trained."""

from __future__ import annotations

from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from dflash_lightning.batch import Cursor


class CursorOwner(Protocol):
    """The data module, as this callback sees it."""

    cursor: Cursor

    def batches_before(self, cursor: Cursor) -> int: ...

    def batches_an_epoch(self) -> int: ...

    def close(self) -> None: ...


class CursorCallback(Callback):
    """Writes the cursor of the batch that was trained last, on optimizer-step boundaries only.

    A checkpoint saved in the middle of an accumulation window holds the weights of the last step and no gradients; the
    cursor of that same step makes the resumed run train the whole window.
    """

    def __init__(self, data: CursorOwner) -> None:
        self._data = data
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._data.cursor = batch.cursor

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Set Lightning's count of the epoch's batches to what the cursor says.

        The two differ after a save inside an accumulation window, and under another number of ranks, where an epoch has
        another number of batches.
        """
        saved = checkpoint.get("HiddenStateDataModule")
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
        if trainer.state.fn != TrainerFn.FITTING or saved is None or not progress or not progress["current"]["ready"]:
            return
        epoch_is_over = saved["batch"] == 0 and saved["pass"] == 0
        done = self._data.batches_an_epoch() if epoch_is_over else self._data.batches_before(self._data.cursor)
        shift = done - progress["current"]["ready"]
        for counts in (progress["current"], progress["total"]):
            for key in ("ready", "started", "processed", "completed"):
                counts[key] = max(0, counts[key] + shift)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._data.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._data.close()
