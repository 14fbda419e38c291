"""Checkpoints of a run: when and how they are saved, and which one `--ckpt_path last` means."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

LAST = "last.ckpt"
_PARTIAL = ".partial"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final name, then renames it: a kill leaves the old file or the new one, whole.

    Lightning's own way builds the file in memory first and passes it through the system's temporary folder.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(final.name + _PARTIAL)
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(final)


class DrafterCheckpoint(ModelCheckpoint):
    """Saves what exact resume needs: every so many optimizer steps and at the end of training.

    The newest file replaces the one before it; `last.ckpt` is a link to it. To keep the best drafters too, add
    Lightning's ModelCheckpoint with `monitor: val/acceptance_length` to `trainer.callbacks`.

    Args:
        every_n_train_steps: optimizer steps between two checkpoints.
        keep_all: keep every file instead of the newest alone.
        dirpath: folder; None takes `checkpoints` in the run folder.
    """

    def __init__(self, every_n_train_steps: int = 500, keep_all: bool = False, dirpath: str | None = None) -> None:
        if every_n_train_steps < 1:
            raise ValueError(f"checkpoint.every_n_train_steps={every_n_train_steps}: at least 1")
        super().__init__(
            dirpath=dirpath,
            filename="step={step}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            save_top_k=-1 if keep_all else 1,
            enable_version_counter=False,
        )

    @property
    def state_key(self) -> str:
        # Lightning's holds the settings: a resumed run with another interval would forget which file it replaces.
        return "DrafterCheckpoint"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero and stage == "fit":
            for left_over in Path(self.dirpath).glob(f"*{_PARTIAL}"):
                left_over.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # Saved at the end of training, Lightning's progress would say that the epoch was complete.
        if trainer.global_step == trainer.max_steps:
            self._save_unless_saved(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # `every_n_train_steps` leaves out the last steps of a run.
        self._save_unless_saved(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        # A scheduler's way to end a job; training stands between two batches. Rank 0 saves alone: nothing says that the
        # other ranks have come here too, and Lightning's own way would wait for them.
        if not isinstance(exception, SIGTERMException) or not (trainer.training and trainer.is_global_zero):
            return
        if self._last_global_step_saved == trainer.global_step or trainer.global_step == 0:
            return
        file = self.format_checkpoint_name(self._monitor_candidates(trainer))
        previous, self.best_model_path = self.best_model_path, file
        trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), file)
        self._link(Path(file))
        if self.save_top_k == 1 and previous and previous != file:
            Path(previous).unlink(missing_ok=True)

    def _save_unless_saved(self, trainer: Trainer) -> None:
        if self._last_global_step_saved != trainer.global_step and trainer.global_step > 0:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if trainer.is_global_zero:
            self._link(Path(filepath))

    @staticmethod
    def _link(file: Path) -> None:
        fresh = file.with_name(LAST + _PARTIAL)
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(file.name)
        fresh.replace(file.with_name(LAST))


def find_last_checkpoint(folder: str | Path) -> Path | None:
    """The readable checkpoint of `folder` with the most steps, or None: a file cut off by a kill is passed over."""
    steps = {file: checkpoint_step(file) for file in Path(folder).glob("*.ckpt") if not file.is_symlink()}
    whole = {file: step for file, step in steps.items() if step is not None}
    return max(whole, key=lambda file: (whole[file], file.stat().st_mtime)) if whole else None


def checkpoint_step(file: str | Path) -> int | None:
    """`global_step` of a checkpoint, read without its tensors; None when the file is not whole or not Lightning's."""
    if not zipfile.is_zipfile(file):  # the archive's directory is written last
        return None
    try:
        return int(torch.load(file, map_location="meta", weights_only=True, mmap=True)["global_step"])
    except (RuntimeError, pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError):
        return None
