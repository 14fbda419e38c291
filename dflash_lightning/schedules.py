"""What changes over the optimizer steps of a run: the learning rate and the noise on the hidden states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupCosineLR(LambdaLR):
    """Linear warm-up, then a half cosine down to a share of the base rate. One step an optimizer step.

    Args:
        optimizer: the optimizer.
        warmup: share of all steps (below 1) or number of steps (1 and more) of the warm-up.
        min_ratio: rate at the end, as a share of the base rate.
        total_steps: steps of the run; None lets DFlashModule fill in what the trainer will run.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: float = 0.04, min_ratio: float = 0.0, total_steps: int | None = None
    ) -> None:
        if warmup < 0 or not 0 <= min_ratio <= 1:
            raise ValueError(f"WarmupCosineLR: warmup={warmup} must be >= 0 and min_ratio={min_ratio} in 0..1")
        self.warmup = warmup
        self.min_ratio = min_ratio
        self.total_steps = total_steps
        super().__init__(optimizer, self._factor)

    def set_total_steps(self, total_steps: int) -> None:
        """Fix the run's length and put the rate of the first step into the optimizer."""
        self.total_steps = total_steps
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self._factor(0)

    def state_dict(self) -> dict[str, Any]:
        """Progress alone: a resumed run follows the settings it is given, so that `max_steps` may be changed."""
        settings = ("warmup", "min_ratio", "total_steps", "base_lrs")
        return {key: value for key, value in super().state_dict().items() if key not in settings}

    def _factor(self, step: int) -> float:
        if self.total_steps is None:
            return 1.0
        warmup = self.warmup if self.warmup >= 1 else self.warmup * self.total_steps
        if step < warmup:
            # From one part, not from zero: a first step of rate 0 would be a wasted batch.
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1.0, self.total_steps - warmup))
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class HiddenStateNoise:
    """Noise on the hidden states in training: the drafter learns to live with states that differ a little.

    Args:
        strength: standard deviation (gaussian) or half width (uniform) at the first step, in the hidden states' units.
        end: strength at the last step (linear, cosine).
        distribution: "gaussian" or "uniform".
        schedule: "constant", "linear" or "cosine", over the optimizer steps of the run.
        steps: optimizer steps of the schedule; None takes the whole run.
    """

    strength: float = 0.0
    end: float = 0.0
    distribution: Literal["gaussian", "uniform"] = "gaussian"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.strength < 0 or self.end < 0:
            raise ValueError(f"noise: strength={self.strength} and end={self.end} must not be negative")
        if self.distribution not in ("gaussian", "uniform"):
            raise ValueError(f"noise.distribution={self.distribution!r}: 'gaussian' or 'uniform'")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"noise.schedule={self.schedule!r}: 'constant', 'linear' or 'cosine'")

    def at(self, step: int, total_steps: int) -> float:
        """Strength at optimizer step `step`."""
        if self.schedule == "constant":
            return self.strength
        progress = min(1.0, step / max(1, (self.steps or total_steps)))
        if self.schedule == "cosine":
            progress = 0.5 * (1 - math.cos(math.pi * progress))
        return self.strength + (self.end - self.strength) * progress

    def apply(self, hidden_TF: Tensor, step: int, total_steps: int, seed: int) -> Tensor:
        """`hidden_TF` with the noise of this step; everything random follows from `seed`."""
        strength = self.at(step, total_steps)
        if strength == 0.0:
            return hidden_TF
        generator = torch.Generator(device=hidden_TF.device).manual_seed(seed)
        noise = torch.empty_like(hidden_TF, dtype=torch.float32)
        if self.distribution == "gaussian":
            noise.normal_(0.0, strength, generator=generator)
        else:
            noise.uniform_(-strength, strength, generator=generator)
        return (hidden_TF + noise).to(hidden_TF.dtype)
