"""Teacher-forced decoding: what a drafter would gain on a given text, without running the target token by token.

On text that the target itself wrote greedily, the walk equals real speculative decoding of the same prompt.
Shapes: T tokens, N anchors, K slots a block, F = L_t*H hidden values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_lightning.drafter.config import mask_token_id
from dflash_lightning.drafter.decoding import resolve_num_speculative_tokens
from dflash_lightning.drafter.layout import BlockLayout
from dflash_lightning.drafter.metrics import accepted_lengths
from dflash_lightning.drafter.model import DFlashDraftModel

# Blocks a pass; their logits, [64 * K, V] in float32, are what costs memory.
_BLOCKS = 64


@torch.inference_mode()
def gains(
    drafter: DFlashDraftModel,
    embed: Callable[[Tensor], Tensor],
    lm_head: Callable[[Tensor], Tensor],
    ids: Sequence[int],
    hidden_TF: Tensor,
    first: int,
    num_speculative_tokens: int | None = None,
) -> list[int]:
    """Tokens that a block at each anchor `first`, ..., T - 2 would gain: 1 + the leading slots that equal the text.

    Args:
        embed, lm_head: the target's embedding and LM head.
        ids: the text, T tokens of one document.
        hidden_TF: its tapped hidden states.
        first: first anchor: the first token of the answer.
    """
    size = resolve_num_speculative_tokens(drafter.config.block_size, num_speculative_tokens) + 1
    device = next(drafter.parameters()).device
    ids_T = torch.as_tensor(ids, device=device)
    hidden_TF = hidden_TF.to(device)
    offsets_K = torch.arange(size, device=device)
    found: list[int] = []
    for start in range(first, len(ids) - 1, _BLOCKS):
        anchors_N = torch.arange(start, min(start + _BLOCKS, len(ids) - 1), device=device)
        context = int(anchors_N[-1])  # the last anchor's own state is not seen
        layout = BlockLayout(
            block_size=size,
            num_context=context,
            anchors=anchors_N,
            context_start=torch.zeros_like(anchors_N),
            anchor_positions=anchors_N,
            positions=torch.arange(context, device=device),
        )
        block_NK = torch.full((len(anchors_N), size), mask_token_id(drafter.config), device=device)
        block_NK[:, 0] = ids_T[anchors_N]
        states_NKH = drafter(embed(block_NK), hidden_TF[:context], layout, attention="sdpa")
        position_NK = anchors_N[:, None] + offsets_K
        inside_NK = position_NK < len(ids)
        labels_NK = ids_T[position_NK.clamp(max=len(ids) - 1)]
        correct_NK = lm_head(states_NKH).argmax(-1) == labels_NK
        found += accepted_lengths(correct_NK, inside_NK).tolist()
    # A block that is right to the end of the text would have had a bonus token behind it, which is not there.
    return [min(gain, len(ids) - 1 - (first + i)) for i, gain in enumerate(found)]


def walk(gained: Sequence[int]) -> list[int]:
    """The blocks of `gains` that decoding would draft: the next anchor is the anchor + accepted + 1."""
    visited, i = [], 0
    while i < len(gained):
        visited.append(gained[i])
        i += gained[i]
    return visited
