"""Nothing in a training step waits for the device, Lightning's, the optimizer's and torchmetrics' calls included."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result the host must read, or whose size depends on the data.
_SYNCING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_consecutive"}


class SyncCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1] or ()
        )
        if name in _SYNCING or by_mask:
            where = [f"{f.filename.rsplit('/', 2)[-2:]}:{f.lineno}" for f in traceback.extract_stack()[-14:-1]]
            self.seen.append(f"{func} at {where}")
        return func(*args, **(kwargs or {}))


class CountSyncs(Callback):
    """Counts from the start of one batch to the start of a later one, everything between them included."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.counter = SyncCounter()
        self.active = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == self.first:
            self.counter.__enter__()
            self.active = True
        elif batch_idx == self.last and self.active:
            self.counter.__exit__(None, None, None)
            self.active = False


def test_no_host_sync_in_a_step(make_run, write_chats: Callable[..., str]) -> None:
    from dflash_lightning.callbacks import StageProfilerCallback
    from dflash_lightning.schedules import HiddenStateNoise

    count = CountSyncs(2, 6)
    options = {"model_noise": HiddenStateNoise(strength=0.1), "trainer_log_every_n_steps": 1000}
    callbacks = [count, StageProfilerCallback(profile_interval=60)]
    trainer, module, data = make_run(write_chats(60), callbacks=callbacks, trainer_max_steps=8, **options)
    trainer.fit(module, datamodule=data)
    assert not count.active
    assert count.counter.seen == []


def test_the_counter_sees_a_sync() -> None:
    with SyncCounter() as counter:
        float(torch.ones(()) + 1)
        torch.ones(3)[torch.tensor([True, False, True])]
    assert len(counter.seen) >= 2
