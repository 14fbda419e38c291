"""Real speculative decoding of held-out prompts while training runs."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import SamplingOptions, resolve_num_speculative_tokens
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.profiling import main_span
from dflash_lightning.prompts import Prompt, read_prompts
from dflash_lightning.speculative import SpeculativeDecoder, acceptance_by_slot, check_decodable


class AcceptanceCallback(Callback):
    """Decodes prompts greedily with the drafter as it is, every so many optimizer steps, on rank 0.

    Writes `acceptance/tau` (tokens gained per target forward), `acceptance/slot_k` (share of target forwards that
    accepted slot k) and `acceptance/gap_to_teacher_forced` (tau minus the mean over all anchors of the same answers,
    which is how training measures). All are there for `ModelCheckpoint(monitor="acceptance/tau")`, whose
    `every_n_train_steps` should be a multiple of `every_n_steps`.

    Rank 0 loads the whole target at the first measurement and keeps it. The other ranks wait for its figures, as they
    would at the next step's gradients; an error on rank 0 reaches them with the figures, and `max_seconds` keeps the
    wait far below the process group's timeout.

    Args:
        prompts: file of prompts: JSONL with `messages` or `prompt`, or plain lines.
        every_n_steps: optimizer steps between two measurements.
        max_new_tokens: most tokens to decode a prompt.
        max_prompts: use the file's first so many prompts.
        max_seconds: begin no further batch after so many seconds of decoding; the first is always decoded.
        batch_size: prompts to decode together; it costs memory and changes no figure beyond rounding.
        num_speculative_tokens: tokens to draft a forward; None drafts block_size - 1.
        device: where target and drafter decode; None takes rank 0's device.
        dtype: dtype of target and drafter while decoding; `auto` takes the target's as stored.
    """

    def __init__(
        self,
        prompts: str,
        every_n_steps: int = 500,
        max_new_tokens: int = 64,
        max_prompts: int = 16,
        max_seconds: float = 120.0,
        batch_size: int = 8,
        num_speculative_tokens: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
    ) -> None:
        counts = {"every_n_steps": every_n_steps, "max_new_tokens": max_new_tokens, "max_prompts": max_prompts}
        counts["batch_size"] = batch_size
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"AcceptanceCallback.{name}={value}: at least 1")
        if max_seconds <= 0:
            raise ValueError(f"AcceptanceCallback.max_seconds={max_seconds}: must be positive")
        self.prompts = prompts
        self.every_n_steps = every_n_steps
        self.max_new_tokens = max_new_tokens
        self.max_prompts = max_prompts
        self.max_seconds = max_seconds
        self.batch_size = batch_size
        self.num_speculative_tokens = num_speculative_tokens
        self.device = device
        self.dtype = dtype
        self._decoder: SpeculativeDecoder | None = None
        self._measured_step = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # A mistake in the options should show now, not at the first measurement.
        if not Path(self.prompts).expanduser().is_file():
            raise FileNotFoundError(f"AcceptanceCallback.prompts={self.prompts}: no such file")
        self._read_prompts()
        module: Any = pl_module
        config = module.drafter.config
        resolve_num_speculative_tokens(config.block_size, self.num_speculative_tokens)
        check_decodable(module.target, target_layer_ids(config), module.trust_remote_code, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"measured_step": self._measured_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._measured_step = state_dict["measured_step"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # The step stands still inside an accumulation window.
        if step == self._measured_step or step == 0 or step % self.every_n_steps:
            return
        self._measured_step = step
        with main_span("drafter.acceptance"):
            self._measure_and_log(trainer, pl_module, step)

    def _measure_and_log(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        result: tuple[dict[str, float] | None, str] = (None, "")
        error: Exception | None = None
        if trainer.is_global_zero:
            try:
                result = (self._measure(pl_module, trainer.strategy.root_device), "")
            except Exception as e:
                # Raised below, after the other ranks know: they would wait for the figures until the group's timeout.
                error, result = e, (None, f"{type(e).__name__}: {e}")
        if trainer.world_size > 1:
            result = trainer.strategy.broadcast(result, src=0)
        scalars, problem = result
        if scalars is None:
            if error is not None:
                raise error
            raise RuntimeError(f"AcceptanceCallback: decoding failed on rank 0: {problem}")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(scalars, step=step)
        for name, value in scalars.items():
            # Every rank, the same value: ModelCheckpoint decides on each of them. The logger has it, on our axis.
            pl_module.log(name, value, logger=False, on_step=True, on_epoch=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._decoder = None

    def _read_prompts(self) -> list[Prompt]:
        return read_prompts(Path(self.prompts).expanduser())[: self.max_prompts]

    def _measure(self, pl_module: Any, root_device: torch.device) -> dict[str, float]:
        config = pl_module.drafter.config
        if self._decoder is None:
            self._decoder = SpeculativeDecoder(
                pl_module.target,
                target_layer_ids(config),
                dtype=self.dtype,
                device=self.device or root_device,
                trust_remote_code=pl_module.trust_remote_code,
            )
        decoder = self._decoder
        drafter = _copy_of(pl_module.drafter, decoder)
        options = SamplingOptions(self.max_new_tokens, 0.0, decoder.stop_ids)
        prompts = self._read_prompts()
        gained: list[int] = []
        forced: list[int] = []
        started = time.monotonic()
        for done in range(0, len(prompts), self.batch_size):
            if done and time.monotonic() - started > self.max_seconds:
                warnings.warn(
                    f"AcceptanceCallback: {done} of {len(prompts)} prompts decoded in max_seconds={self.max_seconds}; "
                    "the figures are those of fewer prompts than before",
                    stacklevel=2,
                )
                break
            ids = [decoder.encode(prompt.messages) for prompt in prompts[done : done + self.batch_size]]
            outs = decoder.decode_batch(drafter, ids, options, num_speculative_tokens=self.num_speculative_tokens)
            gained += [gain for out in outs for gain in out.gained]
            answers = [out.tokens for out in outs]
            for gains in decoder.teacher_forced(drafter, ids, answers, self.num_speculative_tokens):
                forced += gains
        num_drafted = resolve_num_speculative_tokens(config.block_size, self.num_speculative_tokens)
        tau = sum(gained) / max(len(gained), 1)
        slots = enumerate(acceptance_by_slot(gained, num_drafted), start=1)
        return {
            "acceptance/tau": tau,
            "acceptance/gap_to_teacher_forced": tau - sum(forced) / max(len(forced), 1),
            **{f"acceptance/slot_{k}": share for k, share in slots},
        }


def _copy_of(drafter: DFlashDraftModel, decoder: SpeculativeDecoder) -> DFlashDraftModel:
    """The drafter in the target's dtype and on its device; the training's own is not touched, nor is any RNG state."""
    device, dtype = decoder.target.device, decoder.head.weight.dtype
    with torch.device("meta"):
        copy = DFlashDraftModel(drafter.config)
    weights = {name: value.detach().to(device, dtype, copy=True) for name, value in drafter.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    return copy.requires_grad_(False).eval()
