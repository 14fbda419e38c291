"""Lightning's SIGTERM check under several ranks, done every few seconds instead of before every batch."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

_SECONDS_BETWEEN_CHECKS = 3.0
_MOST_BATCHES_BETWEEN_CHECKS = 1000


class ThrottledSigtermCheck(Callback):
    """Replaces the broadcast (a copy to the device, a collective and a wait for it) that Lightning does every batch.

    All ranks must check before the same batch, so rank 0 sends along after how many batches the next check comes: as
    many as fit into three seconds at the speed that it saw.
    """

    def __init__(self) -> None:
        self._remaining = 0
        self._batches = 0
        self._last = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size == 1:
            return
        self._remaining = self._batches = 0
        self._last = time.monotonic()
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        self._batches += 1
        if self._remaining > 0:
            self._remaining -= 1
            return
        now = time.monotonic()
        per_batch = max((now - self._last) / self._batches, 1e-6)
        skip = min(int(_SECONDS_BETWEEN_CHECKS / per_batch), _MOST_BATCHES_BETWEEN_CHECKS)
        # The first batches hold start-up and compilation: look again soon, until the speed is known.
        skip = min(skip, 2 * self._batches)
        self._last, self._batches = now, 0
        state = torch.tensor([int(trainer.received_sigterm), skip], device=trainer.strategy.root_device)
        torch.distributed.broadcast(state, src=0)
        received, self._remaining = state.tolist()  # sync: once in three seconds
        if received:
            torch.distributed.barrier()  # all ranks leave together
            raise SIGTERMException
