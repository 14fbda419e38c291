"""Settings in a checkpoint: plain values, and what differs from them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pytest
import torch

from dflash_lightning.settings import OptimizerSettings, changes, plain


class Kind(StrEnum):
    ONE = "one"


@dataclass
class Noise:
    strength: float


def test_whatever_is_configured_loads_again_as_plain_values() -> None:
    given = {
        "none": None, "flag": True, "rate": np.float64(1e-3), "count": np.int64(3), "tensor": torch.tensor(0.5),
        "pair": (0.9, 0.95), "kind": Kind.ONE, "noise": Noise(0.1), "class": torch.optim.AdamW, "nested": {1: [2]},
        "object": object(),
    }  # fmt: skip
    file = io.BytesIO()
    torch.save(plain(given), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {
        "none": None, "flag": True, "rate": 1e-3, "count": 3, "tensor": 0.5, "pair": [0.9, 0.95],
        "kind": str(Kind.ONE), "noise": {"strength": 0.1}, "class": "torch.optim.adamw.AdamW", "nested": {"1": [2]},
        "object": "builtins.object",
    }  # fmt: skip


def test_changes_are_named_with_both_values() -> None:
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "new": 4}) == ["b is 3 now; the checkpoint had 2"]
    assert changes({"gone": 2}, {}) == ["gone is None now; the checkpoint had 2"]


def configured(
    lr: float, **options
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, OptimizerSettings]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr, **options.pop("optimizer", {}))
    settings = OptimizerSettings(optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, total_steps=20, **options)
    settings.add_scheduler(scheduler)
    return optimizer, scheduler, settings


def test_only_what_changed_is_put_in_again() -> None:
    """A one-cycle schedule moves betas and rates itself: those must stay where the checkpoint left them."""
    optimizer, scheduler, before = configured(1e-3, max_lr=1e-2)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    state = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler, after = configured(1e-3, max_lr=2e-2, optimizer={"weight_decay": 0.3})
    optimizer.load_state_dict(state[0])
    scheduler.load_state_dict(state[1])
    (group,) = optimizer.param_groups
    betas = group["betas"]
    assert group["weight_decay"] == 0.01, "the checkpoint's"
    after.reapply(before.settings)
    assert group["weight_decay"] == 0.3
    assert group["max_lr"] == 2e-2
    assert group["betas"] == betas
    assert group["lr"] == state[0]["param_groups"][0]["lr"], "the schedule sets it at its next step"


def test_another_optimizers_state_is_refused() -> None:
    _, _, settings = configured(1e-3, max_lr=1e-2)
    settings.check_kind({})
    settings.check_kind(settings.settings)
    with pytest.raises(ValueError, match=r"model\.optimizer is torch\.optim\.adamw\.AdamW; .* state of x\.SGD"):
        settings.check_kind({"model.optimizer": "x.SGD"})
