"""The LightningCLI of `dflash fit` and `dflash validate`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from dflash_lightning.callbacks import DrafterCheckpoint, PipelineProgressBar, StageProfilerCallback
from dflash_lightning.callbacks.checkpoint import AtomicCheckpointIO, checkpoint_step, find_last_checkpoint
from dflash_lightning.datamodule import HiddenStateDataModule
from dflash_lightning.module import DFlashModule

DEFAULT_RUN_DIR = "runs/drafter"


class KeepFirstConfig(SaveConfigCallback):
    """Saves the configuration into the run folder; a resumed run keeps the first and numbers its own."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.already_saved or not trainer.is_global_zero or stage != "fit":
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file, number = folder / "config.yaml", 1
        while file.exists():
            number += 1
            file = folder / f"config-{number}.yaml"
        self.parser.save(self.config, str(file), skip_none=False)
        self.already_saved = True


class DFlashCLI(LightningCLI):
    """`fit` and `validate` of a DFlashModule on a HiddenStateDataModule.

    The run folder is `trainer.default_root_dir`: TensorBoard files, `checkpoints/` and `config.yaml` lie in it, without
    numbered versions, so that `--ckpt_path last` finds them.
    """

    def __init__(self, args: list[str] | None = None) -> None:
        # Nothing that a user could act on: Lightning's own use of torch, and the run folder that a resume goes on in.
        for message in (r".*LeafSpec.*deprecated", r"Checkpoint directory .* exists and is not empty"):
            warnings.filterwarnings("ignore", message=message)
        super().__init__(
            DFlashModule,
            HiddenStateDataModule,
            args=args,
            save_config_callback=KeepFirstConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={
                "default_root_dir": DEFAULT_RUN_DIR,
                "gradient_clip_val": 1.0,
                "log_every_n_steps": 10,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
            },
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        skipped = {"model", "datamodule"}
        return {
            "fit": {*skipped, "train_dataloaders", "val_dataloaders", "weights_only"},
            "validate": {*skipped, "dataloaders", "weights_only"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.target", "model.target")
        parser.link_arguments("data.trust_remote_code", "model.trust_remote_code")
        parser.add_lightning_class_args(DrafterCheckpoint, "checkpoint")
        parser.add_lightning_class_args(PipelineProgressBar, "progress")
        parser.add_lightning_class_args(StageProfilerCallback, "profile")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        run_dir = Path(config["default_root_dir"] or DEFAULT_RUN_DIR)
        checkpoint = self._checkpoint_path(run_dir)
        if self.subcommand == "validate" and config["logger"] in (None, True):
            kwargs["logger"] = False  # its figures belong to no step of the run; `after_validate` prints them
        elif config["logger"] in (None, True):
            # Events after the checkpoint belong to steps that will be run again: TensorBoard drops them.
            purge: dict[str, Any] = {}
            if checkpoint is not None:
                purge["purge_step"] = (checkpoint_step(checkpoint) or 0) + 1
            kwargs["logger"] = TensorBoardLogger(str(run_dir), name="", version="", default_hp_metric=False, **purge)
        # Lightning refuses a trainer that is told to do without and given one.
        for key, option in (("progress", "enable_progress_bar"), ("checkpoint", "enable_checkpointing")):
            if config[option] is False:
                self._parser(self.subcommand).callback_keys.remove(key)
        self._step_before = 0 if checkpoint is None else checkpoint_step(checkpoint) or 0
        if checkpoint is not None and self.subcommand == "fit" and self._get(self.config, "model").get("init_from"):
            print("model.init_from is not read: the checkpoint's weights are trained on")
        plugins = config["plugins"] or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        return super().instantiate_trainer(**kwargs)

    def after_fit(self) -> None:
        if self.trainer.global_step == self._step_before:
            limits = f"trainer.max_steps={self.trainer.max_steps}, trainer.max_epochs={self.trainer.max_epochs}"
            print(f"nothing was trained: the run stands at step {self._step_before} ({limits})")

    def after_validate(self) -> None:
        for name, value in sorted(self.trainer.callback_metrics.items()):
            print(f"{name:<24} {float(value):.4f}")

    def _checkpoint_path(self, run_dir: Path) -> Path | None:
        """Resolve `--ckpt_path last`, and refuse to start a fresh run on top of an old one."""
        assert self.subcommand is not None
        options = self.config_init[self.subcommand]
        given = options.get("ckpt_path")
        folder = Path(self._get(self.config_init, "checkpoint").dirpath or run_dir / "checkpoints")
        if given == "last":
            found = find_last_checkpoint(folder)
            if found is None:
                raise FileNotFoundError(
                    f"--ckpt_path last: {folder} holds no readable checkpoint; leave --ckpt_path out to start a new run"
                )
            options["ckpt_path"] = str(found)
            print(f"continuing from {found}")
            return found
        if given is not None:
            if not Path(given).is_file() or checkpoint_step(given) is None:
                raise FileNotFoundError(f"--ckpt_path {given}: no such checkpoint, or the file is cut off")
            return Path(given)
        if self.subcommand == "fit" and any(folder.glob("*.ckpt")):
            raise ValueError(
                f"trainer.default_root_dir={run_dir}: this folder already holds a run; continue it with "
                "--ckpt_path last, or give another folder"
            )
        return None
