"""When the training scalars are logged: before any checkpoint is saved."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dflash_lightning.profiling import mirror_main_spans


class LogTraining(Callback):
    """Calls the module's `log_training_if_due`.

    The module's own hook runs after the checkpoint's, and the file would hold counters that have been logged already.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        module.log_training_if_due()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mirror_main_spans(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        mirror_main_spans(None)
