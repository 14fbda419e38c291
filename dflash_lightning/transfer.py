"""How a batch gets from a slot of host memory to the rank's device, beside the running step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Protocol

import torch
from torch import Tensor

from dflash_lightning.batch import HiddenStateBatch
from dflash_lightning.profiling import span


class Transfer(Protocol):
    """`states` and `batch` run in the loader's thread, `hand_over` in the thread that trains."""

    def states(self, hidden: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Copies of a slot's states that no longer need the slot when this returns."""
        ...

    def batch(self, batch: HiddenStateBatch) -> HiddenStateBatch:
        """The batch with all its tensors on the device, perhaps still on their way."""
        ...

    def hand_over(self, batch: HiddenStateBatch) -> HiddenStateBatch:
        """Make what the current stream does next wait for the batch."""
        ...


def make_transfer(device: torch.device, timed: bool = True) -> Transfer:
    """The transfer to `device`; `timed`: its copies are stages of the training step."""
    return CudaTransfer(device, timed) if device.type == "cuda" else HostTransfer(device)


class HostTransfer:
    """Copies out of the slot; everything else is where it must be, or moves in one go (other accelerators)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def states(self, hidden: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return hidden.to(self._device, copy=True), None if last is None else last.to(self._device, copy=True)

    def batch(self, batch: HiddenStateBatch) -> HiddenStateBatch:
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def hand_over(self, batch: HiddenStateBatch) -> HiddenStateBatch:
        return batch


class CudaTransfer:
    """Copies on a stream of its own; the training stream waits for an event, the host for nothing."""

    def __init__(self, device: torch.device, timed: bool = True) -> None:
        self._device = device
        self._timed = timed
        self._stream = torch.cuda.Stream(device)
        # In the order in which the batches are handed over; written by one thread, read by another.
        self._events: dict[int, torch.cuda.Event] = {}

    def states(self, hidden: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        with span("drafter.copy_to_device") if self._timed else nullcontext(), torch.cuda.stream(self._stream):
            moved = hidden.to(self._device, non_blocking=True)
            moved_last = None if last is None else last.to(self._device, non_blocking=True)
            # sync: this thread alone; the slot goes back to the producers when this returns.
            self._stream.synchronize()
        return moved, moved_last

    def batch(self, batch: HiddenStateBatch) -> HiddenStateBatch:
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._events[id(moved)] = event
        return moved

    def hand_over(self, batch: HiddenStateBatch) -> HiddenStateBatch:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._events.pop(id(batch)))
        for f in fields(batch):
            value = getattr(batch, f.name)
            if isinstance(value, Tensor):
                value.record_stream(stream)  # made on the other stream, freed by this one
        return batch
