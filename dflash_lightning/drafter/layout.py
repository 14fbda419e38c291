"""Anchors, labels and block layout of one packed batch: host only, numpy and torch, nothing of transformers.

Shapes: T packed tokens, N anchors (padded), K slots a block, M labelled slots (padded), Q = N*K block slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash_lightning.batch import HiddenStateBatch

ANCHOR_MULTIPLE = 64  # N takes few values, so that compiled layers see few shapes
SLOT_MULTIPLE = 256  # M, as HiddenStateBatch promises


def draw_layout(
    input_ids_T: Tensor,
    loss_mask_T: Tensor,
    document_ids_T: Tensor,
    positions_T: Tensor,
    *,
    block_size: int,
    max_anchors: int,
    seed: int,
) -> dict[str, Tensor]:
    """Draw the anchors of a packed batch and lay out their labels: the batch fields `anchors` .. `slot_index`.

    Position a is eligible when the tokens a and a + 1 are both supervised and in one document; at most `max_anchors`
    are drawn, uniformly without replacement, and sorted. `labels[n, k]` is the token at a + k (0 for slot 0 and past
    the document's end); `label_mask` holds for slots k >= 1 up to the first unsupervised token or the document's end.
    Everything follows from the arguments: `seed` (up to 64 bits) feeds a generator of its own.
    A batch without an eligible anchor gives a layout without a valid one.
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: a block holds the anchor and at least 1 drafted token, so use >= 2")
    if max_anchors < 1:
        raise ValueError(f"max_anchors={max_anchors}: use at least 1")
    ids_T = input_ids_T.numpy()
    supervised_T = loss_mask_T.numpy().astype(bool)
    documents_T = document_ids_T.numpy()
    last = max(len(ids_T) - 1, 0)

    eligible = np.flatnonzero(supervised_T[:-1] & supervised_T[1:] & (documents_T[:-1] == documents_T[1:]))
    if len(eligible) > max_anchors:
        generator = np.random.default_rng(seed & (2**64 - 1))
        eligible = np.sort(generator.choice(eligible, max_anchors, replace=False))
    count = len(eligible)
    padded = min(max(-(-count // ANCHOR_MULTIPLE), 1) * ANCHOR_MULTIPLE, max_anchors)

    token_NK = eligible[:, None] + np.arange(block_size)
    inside_NK = token_NK <= last
    token_NK = np.minimum(token_NK, last)
    inside_NK &= documents_T[token_NK] == documents_T[eligible][:, None]
    mask_NK = np.logical_and.accumulate(inside_NK & supervised_T[token_NK], axis=1)
    # Slot 0 holds the anchor itself, a token that is already verified.
    inside_NK[:, 0] = mask_NK[:, 0] = False

    anchors_N = np.zeros(padded, np.int64)
    anchors_N[:count] = eligible
    labels_NK = np.zeros((padded, block_size), np.int64)
    labels_NK[:count] = np.where(inside_NK, ids_T[token_NK], 0)
    label_mask_NK = np.zeros((padded, block_size), bool)
    label_mask_NK[:count] = mask_NK
    slots = np.flatnonzero(label_mask_NK)
    slot_index_M = np.full(max(-(-len(slots) // SLOT_MULTIPLE), 1) * SLOT_MULTIPLE, -1, np.int64)
    slot_index_M[: len(slots)] = slots
    return {
        "anchors": torch.from_numpy(anchors_N),
        "anchor_valid": torch.from_numpy(np.arange(padded) < count),
        "labels": torch.from_numpy(labels_NK),
        "label_mask": torch.from_numpy(label_mask_NK),
        "slot_index": torch.from_numpy(slot_index_M),
    }


class SlotRanges(NamedTuple):
    """What each block slot sees, as two half-open ranges: of the packed context and of the Q block slots."""

    context_start: Tensor  # [Q]
    context_end: Tensor  # [Q]
    own_start: Tensor  # [Q]
    own_end: Tensor  # [Q]


class BlockGroup(NamedTuple):
    """Consecutive blocks of one document and the context range that any of them may see (host ints)."""

    first: int
    last: int  # one past the last block
    start: int
    shared_end: int  # one past the last context token that every block sees (without a window)
    end: int


@dataclass
class BlockLayout:
    """Where the blocks of one packed batch lie: device tensors, and host ints only for those who ask (`groups`)."""

    block_size: int
    num_context: int  # T
    anchors: Tensor  # [N] index into T; 0 where the anchor is padding
    context_start: Tensor  # [N] first token of the anchor's document; 0 where the anchor is padding
    anchor_positions: Tensor  # [N] relative to the document
    positions: Tensor  # [T]
    masks: dict[Any, Any] = field(default_factory=dict)  # attention masks made for this layout, one a kind of layer
    _groups: dict[tuple[int, int | None], list[BlockGroup]] = field(default_factory=dict)

    @property
    def block_positions(self) -> Tensor:
        """Document-relative position of each slot, [N, K]."""
        return self.anchor_positions[:, None] + torch.arange(self.block_size, device=self.anchors.device)

    def slot_ranges(self, window: int | None, causal_block: bool) -> SlotRanges:
        """The ranges that DESIGN's visibility rule gives: context j with start <= j < a and (a + k) - j < window."""
        num_blocks, size = self.anchors.numel(), self.block_size
        slot_K = torch.arange(size, device=self.anchors.device)
        start_NK = self.context_start[:, None].expand(-1, size)
        if window is not None:
            start_NK = torch.maximum(start_NK, self.anchors[:, None] + slot_K - window + 1)
        # A short window may leave a late slot no context at all.
        end_NK = torch.maximum(self.anchors[:, None], start_NK)
        own_N1 = torch.arange(num_blocks, device=slot_K.device)[:, None] * size
        own_NK = own_N1.expand(-1, size)
        own_end_NK = own_N1 + slot_K + 1 if causal_block else own_NK + size
        return SlotRanges(start_NK.flatten(), end_NK.flatten(), own_NK.flatten(), own_end_NK.flatten())

    def groups(self, max_blocks: int, window: int | None = None) -> list[BlockGroup]:
        """Runs of at most `max_blocks` consecutive blocks of one document (padding counts as one more document)."""
        key = (max_blocks, window)
        if key not in self._groups:
            # sync: free on CPU tensors; on CUDA only the blockwise fallback comes here, once a layout.
            anchors, starts = torch.stack([self.anchors, self.context_start]).tolist()
            groups, first = [], 0
            for n in range(1, len(anchors) + 1):
                if n == len(anchors) or starts[n] != starts[first] or n - first == max_blocks:
                    shared_end, end = min(anchors[first:n]), max(anchors[first:n])
                    start = starts[first] if window is None else max(starts[first], shared_end - window + 1)
                    groups.append(BlockGroup(first, n, start, shared_end, end))
                    first = n
            self._groups[key] = groups
        return self._groups[key]


def make_block_layout(batch: HiddenStateBatch) -> BlockLayout:
    """The layout of a batch that `draw_layout` has drawn; runs on the batch's device without a host sync."""
    anchors_N = torch.where(batch.anchor_valid, batch.anchors, 0)
    positions_N = torch.where(batch.anchor_valid, batch.positions[anchors_N], 0)
    return BlockLayout(
        block_size=batch.labels.shape[1],
        num_context=batch.positions.numel(),
        anchors=anchors_N,
        context_start=anchors_N - positions_N,
        anchor_positions=positions_N,
        positions=batch.positions,
    )
