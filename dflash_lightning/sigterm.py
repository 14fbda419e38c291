"""SIGTERM under several ranks: all leave training before the same batch."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

_SECONDS_BETWEEN_CHECKS = 3.0
_MOST_BATCHES_BETWEEN_CHECKS = 1000


class ThrottledSigtermCheck(Callback):
    """Replaces Lightning's SIGTERM handler and its check before every batch, where there are several ranks.

    Lightning's handler starts a collective wherever the signal finds the process: between two all-reduces of a step the
    ranks' collectives would be paired wrongly, and training would hang or step on garbage. Its check is a copy to the
    device, a collective and a wait for it, every batch. Here the handler sets a flag, and the ranks exchange the flags
    every few seconds. All ranks must do so before the same batch, so they send along after how many batches the next
    check comes: as many as fit into three seconds at the speed that they saw.
    """

    def __init__(self) -> None:
        self._received = False
        self._remaining = 0
        self._batches = 0
        self._last = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size == 1:
            return
        self._received = False
        self._remaining = self._batches = 0
        self._last = time.monotonic()
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: self._check(trainer)
        if threading.current_thread() is threading.main_thread():
            # Lightning puts the handlers from before training back when training ends.
            earlier = trainer._signal_connector._original_handlers.get(signal.SIGTERM)

            def handler(number: int, frame: Any) -> None:
                self._received = True
                if callable(earlier):
                    earlier(number, frame)

            signal.signal(signal.SIGTERM, handler)

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
        state = torch.tensor([int(self._received), skip], device=trainer.strategy.root_device)
        torch.distributed.all_reduce(state, op=torch.distributed.ReduceOp.MAX)
        received, self._remaining = state.tolist()  # sync: once in three seconds
        if received:
            raise SIGTERMException
