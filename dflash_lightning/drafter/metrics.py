"""Counters of the training step, kept on the device in one tensor and read once a logging interval.

Shapes: N blocks, K slots a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

SCALARS = ("loss_numerator", "loss_denominator", "correct", "slots", "accepted", "blocks")


def accepted_lengths(correct_NK: Tensor, label_mask_NK: Tensor) -> Tensor:
    """1 + the number of leading slots k >= 1 that are labelled and right, for every block; [N].

    The first miss ends the run, and so does a slot without a label. Slot 0 never counts.
    """
    hit_NK = (correct_NK & label_mask_NK)[:, 1:]
    return 1 + hit_NK.long().cumprod(1).sum(1)


class DrafterMetrics(Metric):
    """Loss, accuracy, acceptance length and accuracy by slot over everything since the last reset.

    All counters lie in one float64 vector, so that ranks exchange them in one all-reduce.
    """

    full_state_update = False
    higher_is_better = None
    sums: Tensor

    def __init__(self, block_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block_size = block_size
        zeros = torch.zeros(len(SCALARS) + 2 * block_size, dtype=torch.float64)
        self.add_state("sums", default=zeros, dist_reduce_fx="sum")

    def update(
        self, loss_numerator: Tensor, loss_denominator: Tensor, correct_NK: Tensor, label_mask_NK: Tensor
    ) -> None:
        """Add one batch; no host sync."""
        hit_NK = correct_NK & label_mask_NK
        block_N = label_mask_NK.any(1)
        accepted_N = accepted_lengths(correct_NK, label_mask_NK) * block_N
        scalars = (
            loss_numerator.detach(),
            loss_denominator.detach(),
            hit_NK.sum(),
            label_mask_NK.sum(),
            accepted_N.sum(),
            block_N.sum(),
        )
        per_slot = torch.cat([hit_NK.sum(0), label_mask_NK.sum(0)])
        self.sums += torch.cat([torch.stack([x.to(self.sums.dtype) for x in scalars]), per_slot.to(self.sums.dtype)])

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        # A module cast to bfloat16 would take its counters along, and those stop counting at 256.
        return super()._apply(lambda x: fn(x).to(x.dtype), exclude_state)

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        # torchmetrics' own way is a barrier, a gather and a look at every rank's shape.
        total = self.sums.clone()
        torch.distributed.all_reduce(total, group=process_group or self.process_group)
        self.sums = total

    def compute(self) -> dict[str, Tensor]:
        """`loss`, `accuracy`, `acceptance_length` (scalars) and `accuracy_slots` [K]; 0 where nothing was counted."""
        numerator, denominator, correct, slots, accepted, blocks = self.sums[: len(SCALARS)].unbind()
        slot_correct_K, slot_count_K = self.sums[len(SCALARS) :].view(2, self.block_size).unbind()
        # A zero count has a zero numerator; dividing by 1 keeps it 0 without a look at the value.
        return {
            "loss": numerator / torch.where(denominator > 0, denominator, 1.0),
            "accuracy": correct / slots.clamp(min=1),
            "acceptance_length": accepted / blocks.clamp(min=1),
            "accuracy_slots": slot_correct_K / slot_count_K.clamp(min=1),
        }


def to_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Scalars, and `accuracy_slots` as `accuracy_slot/k` for k >= 1, with one copy from the device."""
    names = [name for name in metrics if name != "accuracy_slots"]
    device = metrics["accuracy_slots"].device
    flat = torch.cat(
        [torch.stack([metrics[n].to(device, torch.float64) for n in names]), metrics["accuracy_slots"][1:]]
    )
    values = flat.tolist()  # sync: that copy
    slots = {f"accuracy_slot/{k}": v for k, v in enumerate(values[len(names) :], start=1)}
    return dict(zip(names, values, strict=False)) | slots
