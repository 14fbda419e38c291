"""Muon for the drafter's matrices, AdamW for its norm weights: one optimizer for Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

# Coefficients of the quintic iteration, from Jordan et al.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(Optimizer):
    """Muon with Nesterov momentum and the update scale of AdamW.

    `torch.optim.Muon` always iterates in bfloat16, which a CPU without instructions for it multiplies a hundred times
    slower than float32; here the device decides, and matrices of one shape go through the iteration together.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                grads = [p.grad for p in parameters if p.grad is not None]
                averages = [self._average(p) for p in parameters]
                torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
                looked_ahead = torch._foreach_lerp(grads, averages, group["momentum"])
                updates = orthogonalize(torch.stack(looked_ahead))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype).unbind()), alpha=-scale)

    def _average(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonalize(matrices_BMN: Tensor, steps: int = 5) -> Tensor:
    """Each matrix with its singular values brought near 1, by Newton-Schulz iterations; bfloat16 on a GPU."""
    x = matrices_BMN.to(torch.float32 if matrices_BMN.device.type == "cpu" else torch.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x if wide else x.mT


class MuonAdamW(Optimizer):
    """Muon on the two-dimensional parameters and fused AdamW on the others, behind one interface.

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
            self._parts.append(Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum))
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
