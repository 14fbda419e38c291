"""HiddenStateBatch: the one object that crosses from producers to the training step.

Shapes: T packed tokens, L_t tapped target layers, H hidden size, N anchors, K slots a block, M labelled slots
(padded to a multiple of 256).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Cursor(NamedTuple):
    """Where the next batch stands: the state after the batch that carries it has been trained."""

    epoch: int
    batch: int  # global batch number in the plan of `epoch`, over all ranks
    reuse_pass: int  # pass over one produced batch, 0 .. reuse - 1


class BatchSpec(NamedTuple):
    """What the training step needs of a batch; `DFlashModule.batch_spec()` gives it, the data module asks for it."""

    target_layer_ids: tuple[int, ...]
    last_hidden_state: bool
    block_size: int
    max_anchors: int
    hidden_width: int  # L_t * H


@dataclass
class HiddenStateBatch:
    """Packed rows with the target's hidden states and the block layout drawn for them.

    Rows lie one after the other without padding; `document_ids` tells them apart. Everything whose size depends on
    the data is computed on the host and padded, so that the training step needs no host synchronisation.
    """

    input_ids: Tensor  # [T] int64
    hidden_states: Tensor  # [T, L_t*H] layers side by side, in the order of `target_layer_ids`
    loss_mask: Tensor  # [T] bool, True = a token that the target itself would generate
    document_ids: Tensor  # [T] int64, 0, 1, ... in order
    positions: Tensor  # [T] int64, relative to the document
    anchors: Tensor  # [N] int64 index into T, sorted; padded with 0
    anchor_valid: Tensor  # [N] bool
    labels: Tensor  # [N, K] int64, token at anchor + k; 0 where there is none
    label_mask: Tensor  # [N, K] bool, slots that count
    slot_index: Tensor  # [M] int64 into N*K of the labelled slots; padded with -1
    last_hidden_state: Tensor | None = None  # [T, H] output of the last decoder layer, before the final norm
    cursor: Cursor | None = None
    row_ids: tuple[int, ...] = ()
    num_tokens: int = 0  # real tokens (T without its padding)
    num_labels: int | None = None  # labelled slots, counted on the host; None = not counted
    step_seed: int = 0  # seed of everything random in this step, from (seed, epoch, batch number, pass)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> HiddenStateBatch:
        """The same batch with every tensor on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)
