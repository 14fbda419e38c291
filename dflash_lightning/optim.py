"""Muon for the drafter's matrices, AdamW for its norm weights: one optimizer for Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` on the two-dimensional parameters and fused AdamW on the others, behind one interface.

    Muon's update has the root mean square of AdamW's, so learning rates carry over. Source: Jordan et al., "Muon"
    (2024); the scaling is that of Moonlight, arXiv 2502.16982.

    Args:
        params: parameters to train.
        lr: learning rate of both.
        weight_decay: decoupled weight decay of the matrices; the others have none.
        momentum: Muon's momentum.
        betas: AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 2e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        params = list(params)
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(
                Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._parts.append(AdamW(others, lr=lr, weight_decay=0.0, betas=betas, fused=True))
        super().__init__([{"params": matrices}, {"params": others}], {"lr": lr})
        self._share()

    def _share(self) -> None:
        # The parts' own groups, so that a scheduler that writes a learning rate here writes it there.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self.state.clear()
        for part in self._parts:
            self.state.update(part.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of both; the closure runs once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' own states."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the parts. Raises ValueError for the state of another optimizer."""
        if "parts" not in state_dict:
            raise ValueError("the checkpoint's optimizer was not MuonAdamW; use the optimizer that it was made with")
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share()
