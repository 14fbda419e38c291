"""Attention of block queries over [context | own block]: one function, three backends.

Shapes: N blocks, K slots a block, Q = N*K block slots, T packed context tokens, A query heads, V key/value heads
(A a multiple of V), d head size; in a group: C blocks, L context tokens, R = C * (A/V) * K rows for one key/value head.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_lightning.drafter.layout import BlockGroup, BlockLayout

BACKENDS = ("auto", "flex", "sdpa", "blockwise")
FLEX_BLOCK = 128
# Blocks a group: more make larger matmuls, but each block pays for the context up to the last anchor of its group.
GROUP_BLOCKS = 8


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that `attention` means on `device`: `auto` is flex on CUDA and blockwise elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"attention={backend!r}: unknown backend; use one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "flex" if device.type == "cuda" else "blockwise"
    return backend


def block_attention(
    q_NKAd: Tensor,
    k_ctx_TVd: Tensor,
    v_ctx_TVd: Tensor,
    k_blk_NKVd: Tensor,
    v_blk_NKVd: Tensor,
    layout: BlockLayout,
    *,
    window: int | None = None,
    causal_block: bool = False,
    backend: str = "blockwise",
) -> Tensor:
    """Attention of every slot over its document's context before the anchor and its own block; [N, K, A, d].

    `window`: slot k of the block at a sees context j only where (a + k) - j < window. `causal_block`: slot k sees the
    slots 0..k of its block instead of all. `blockwise` never forms a score between two blocks; `sdpa` uses a dense
    mask and is the plain reference; `flex` is for CUDA (on CPU it has no backward: ValueError) and wants its context
    with `context_padding` behind it.
    """
    # Under autocast the norms give float32 queries and keys beside bf16 values.
    q_NKAd, k_ctx_TVd, k_blk_NKVd = (x.to(v_ctx_TVd.dtype) for x in (q_NKAd, k_ctx_TVd, k_blk_NKVd))
    if backend == "blockwise":
        return _blockwise(q_NKAd, k_ctx_TVd, v_ctx_TVd, k_blk_NKVd, v_blk_NKVd, layout, window, causal_block)
    if backend == "sdpa":
        return _sdpa(
            q_NKAd, k_ctx_TVd, v_ctx_TVd, k_blk_NKVd, v_blk_NKVd, attention_mask(layout, window, causal_block, backend)
        )
    assert backend == "flex", backend
    if q_NKAd.device.type != "cuda" and torch.is_grad_enabled() and q_NKAd.requires_grad:
        raise ValueError(
            "attention='flex': flex attention has no backward pass on CPU; use 'blockwise' (or 'auto', which takes it)"
        )
    return _flex(
        q_NKAd, k_ctx_TVd, v_ctx_TVd, k_blk_NKVd, v_blk_NKVd, attention_mask(layout, window, causal_block, backend)
    )


def attention_mask(layout: BlockLayout, window: int | None, causal_block: bool, backend: str) -> Any:
    """What `backend` needs for one kind of layer, made once a layout: a BlockMask, a bool [Q, T + Q] or None."""
    key = (backend, window, causal_block)
    if key not in layout.masks:
        make = {"flex": flex_block_mask, "sdpa": dense_mask}.get(backend)
        layout.masks[key] = make(layout, window, causal_block) if make else None
    return layout.masks[key]


# --- sdpa -------------------------------------------------------------------------------------------------------------


def dense_mask(layout: BlockLayout, window: int | None, causal_block: bool) -> Tensor:
    """Which keys of [context | block slots] each slot sees, bool [Q, T + Q]."""
    ranges = layout.slot_ranges(window, causal_block)
    context_T = torch.arange(layout.num_context, device=layout.anchors.device)
    slots_Q = torch.arange(layout.anchors.numel() * layout.block_size, device=layout.anchors.device)
    return torch.cat(
        [
            (context_T >= ranges.context_start[:, None]) & (context_T < ranges.context_end[:, None]),
            (slots_Q >= ranges.own_start[:, None]) & (slots_Q < ranges.own_end[:, None]),
        ],
        dim=1,
    )


def _sdpa(q_NKAd: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, mask: Tensor) -> Tensor:
    keys = torch.cat([k_ctx, k_blk.flatten(0, 1)]).transpose(0, 1)
    values = torch.cat([v_ctx, v_blk.flatten(0, 1)]).transpose(0, 1)
    queries = q_NKAd.flatten(0, 1).transpose(0, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(q_NKAd.shape)


# --- flex -------------------------------------------------------------------------------------------------------------


def context_padding(num_context: int, backend: str) -> int:
    """Rows of zeros that the context needs behind it: flex gets whole tiles and few lengths, so it compiles seldom.

    At most 8 lengths between two powers of two, hence at most an eighth more rows.
    """
    if backend != "flex":
        return 0
    step = max(FLEX_BLOCK, 1 << max(num_context.bit_length() - 4, 0))
    return -num_context % step


def flex_block_mask(layout: BlockLayout, window: int | None, causal_block: bool) -> BlockMask:
    """The BlockMask over keys [context, padded | block slots], from the anchors alone.

    Costs O(Q) plus the grid of 128 x 128 tiles (never [Q, KV]), and no host sync: every slot sees two ranges, so a tile
    row sees the tiles between the smallest start and the largest end of its rows.
    """
    ranges = layout.slot_ranges(window, causal_block)
    offset = layout.num_context + context_padding(layout.num_context, "flex")
    num_slots = layout.anchors.numel() * layout.block_size
    context_start, context_end = ranges.context_start.int(), ranges.context_end.int()
    own_start, own_end = (ranges.own_start + offset).int(), (ranges.own_end + offset).int()

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv >= context_start[q]) & (kv < context_end[q])) | ((kv >= own_start[q]) & (kv < own_end[q]))

    # A slot without context must not widen its tile row, nor leave it a full tile: its range starts behind the context.
    empty_Q = context_end <= context_start
    start_Q, end_Q = torch.where(empty_Q, offset, context_start), torch.where(empty_Q, 0, context_end)
    size = FLEX_BLOCK
    first_R = _per_row(start_Q, torch.amin, offset) // size
    last_R = (_per_row(end_Q, torch.amax, 0) + size - 1) // size
    full_first_R = (_per_row(start_Q, torch.amax, 0) + size - 1) // size
    full_last_R = _per_row(end_Q, torch.amin, offset) // size
    own_first_R = _per_row(own_start, torch.amin, offset + num_slots) // size
    own_last_R = (_per_row(own_end, torch.amax, 0) + size - 1) // size

    tile_C = torch.arange(-(-(offset + num_slots) // size), device=layout.anchors.device)
    full_RC = (tile_C >= full_first_R[:, None]) & (tile_C < full_last_R[:, None])
    seen_RC = (tile_C >= first_R[:, None]) & (tile_C < last_R[:, None])
    own_RC = (tile_C >= own_first_R[:, None]) & (tile_C < own_last_R[:, None])
    return BlockMask.from_kv_blocks(
        *_tile_lists((seen_RC & ~full_RC) | own_RC),
        *_tile_lists(full_RC),
        BLOCK_SIZE=size,
        mask_mod=sees,
        seq_lengths=(num_slots, offset + num_slots),
    )


def _per_row(value_Q: Tensor, reduce: Any, fill: int) -> Tensor:
    return reduce(
        torch.nn.functional.pad(value_Q, (0, -value_Q.numel() % FLEX_BLOCK), value=fill).view(-1, FLEX_BLOCK), dim=1
    )


def _tile_lists(tiles_RC: Tensor) -> tuple[Tensor, Tensor]:
    # BlockMask wants, for each tile row, how many tiles and their numbers first in the list.
    order_RC = torch.argsort(tiles_RC.int(), dim=1, descending=True, stable=True)
    return tiles_RC.sum(1, dtype=torch.int32)[None, None], order_RC.int()[None, None]


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


def _flex(q_NKAd: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, mask: BlockMask) -> Tensor:
    keys = torch.cat([k_ctx, k_blk.flatten(0, 1)]).transpose(0, 1)
    values = torch.cat([v_ctx, v_blk.flatten(0, 1)]).transpose(0, 1)
    queries = q_NKAd.flatten(0, 1).transpose(0, 1)
    # Without compilation flex forms every score; that is fine for tests on CPU and for a caller who compiles us.
    eager = q_NKAd.device.type != "cuda" or torch.compiler.is_compiling()
    attend = flex_attention if eager else _compiled_flex_attention()
    out = attend(queries[None], keys[None], values[None], block_mask=mask, enable_gqa=True)
    return cast(Tensor, out)[0].transpose(0, 1).reshape(q_NKAd.shape)


# --- blockwise --------------------------------------------------------------------------------------------------------


class _Blockwise(torch.autograd.Function):
    """Groups of neighbouring blocks, one softmax over [context | own block]; the backward recomputes the scores.

    Memory: one group's scores, [V, R, L + K] float32 (twice that in the backward). A group reads the context of its
    document up to its last anchor and nothing else, and masked scores are exact zeros after the softmax, so no later
    state, other block or other document can change a bit of its output.
    """

    @staticmethod
    def forward(ctx, q, k_ctx, v_ctx, k_blk, v_blk, layout, window, causal_block):
        keys_VTd, values_VTd = _heads_first(k_ctx), _heads_first(v_ctx)
        out = torch.empty_like(q)
        with torch.autocast(q.device.type, enabled=False):
            for group in layout.groups(GROUP_BLOCKS, window):
                q_rows, _, _, probs = _group_probabilities(q, keys_VTd, k_blk, layout, group, window, causal_block)
                length = group.end - group.start
                own_v = _own_rows(v_blk, group)
                rows = torch.bmm(_own_part(probs, length, own_v), own_v).view_as(q_rows)
                if length:
                    rows.baddbmm_(probs[..., :length], values_VTd[:, group.start : group.end])
                _scatter_rows(out, rows, group)
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, out)
        ctx.kind = (layout, window, causal_block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k_ctx, v_ctx, k_blk, v_blk, out = ctx.saved_tensors
        layout, window, causal_block = ctx.kind
        (grad_out,) = grads
        keys_VTd, values_VTd = _heads_first(k_ctx), _heads_first(v_ctx)
        grad_keys, grad_values = torch.zeros_like(keys_VTd), torch.zeros_like(values_VTd)
        grad_q, grad_k_blk, grad_v_blk = torch.empty_like(q), torch.empty_like(k_blk), torch.empty_like(v_blk)
        scale = 1 / math.sqrt(q.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            for group in layout.groups(GROUP_BLOCKS, window):
                q_rows, own_q, own_k, probs = _group_probabilities(
                    q, keys_VTd, k_blk, layout, group, window, causal_block
                )
                length, context = group.end - group.start, slice(group.start, group.end)
                own_v = _own_rows(v_blk, group)
                grad_rows = _gather_rows(grad_out, group, k_ctx.shape[1])
                own_grad = grad_rows.view_as(own_q)

                grad_scores = torch.empty_like(probs)
                grad_scores[..., :length] = torch.bmm(grad_rows, values_VTd[:, context].transpose(1, 2))
                own_scores = torch.bmm(own_grad, own_v.transpose(1, 2))
                grad_scores[..., length:] = own_scores.view(*grad_rows.shape[:2], -1)
                delta = (grad_rows * _gather_rows(out, group, k_ctx.shape[1])).sum(-1, keepdim=True)
                grad_scores.sub_(delta).mul_(probs)

                own_probs, own_scores = _own_part(probs, length, own_v), _own_part(grad_scores, length, own_v)
                _scatter_own(grad_v_blk, torch.bmm(own_probs.transpose(1, 2), own_grad), group)
                _scatter_own(grad_k_blk, torch.bmm(own_scores.transpose(1, 2), own_q), group)
                rows = torch.bmm(own_scores, own_k).view_as(q_rows)
                if length:
                    rows.baddbmm_(grad_scores[..., :length], keys_VTd[:, context])
                    grad_values[:, context].baddbmm_(probs[..., :length].transpose(1, 2), grad_rows)
                    grad_keys[:, context].baddbmm_(grad_scores[..., :length].transpose(1, 2), q_rows)
                _scatter_rows(grad_q, rows.mul_(scale), group)
        grad_k_ctx = grad_keys.transpose(0, 1).to(k_ctx.dtype)
        grad_v_ctx = grad_values.transpose(0, 1).to(v_ctx.dtype)
        return grad_q, grad_k_ctx, grad_v_ctx, grad_k_blk, grad_v_blk, None, None, None


# A compiled layer must not trace it: the group bounds are host ints that differ in every batch.
_blockwise: Any = torch.compiler.disable(_Blockwise.apply)


def _group_probabilities(
    q: Tensor, keys_VTd: Tensor, k_blk: Tensor, layout: BlockLayout, group: BlockGroup, window: int | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled queries [V, R, d] and [V*C, R/C, d] (one memory), own keys [V*C, K, d], probabilities [V, R, L + K]."""
    num_kv, size, length = keys_VTd.shape[0], layout.block_size, group.end - group.start
    q_rows = _gather_rows(q, group, num_kv).mul_(1 / math.sqrt(q.shape[-1]))
    own_k = _own_rows(k_blk, group)
    own_q = q_rows.view(own_k.shape[0], -1, q.shape[-1])
    scores = q_rows.new_empty(num_kv, q_rows.shape[1], length + size)
    by_slot = scores.view(num_kv, group.last - group.first, -1, size, length + size)
    if length:
        scores[..., :length] = torch.bmm(q_rows, keys_VTd[:, group.start : group.end].transpose(1, 2))
        # Without a window only the columns between the first and the last anchor of the group differ between blocks.
        masked_from = group.start if window is not None else group.shared_end
        if masked_from < group.end:
            column = torch.arange(masked_from, group.end, device=q.device)
            anchor_C11 = layout.anchors[group.first : group.last, None, None]
            hidden_CKL = column >= anchor_C11
            if window is not None:
                slot_K1 = torch.arange(size, device=q.device)[:, None]
                hidden_CKL = hidden_CKL | (anchor_C11 + slot_K1 - column >= window)
            by_slot[..., masked_from - group.start : length].masked_fill_(hidden_CKL[:, None], -math.inf)
    scores[..., length:] = torch.bmm(own_q, own_k.transpose(1, 2)).view(*q_rows.shape[:2], size)
    if causal:
        later_KK = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        by_slot[..., length:].masked_fill_(later_KK, -math.inf)
    return q_rows, own_q, own_k, torch.softmax(scores, dim=-1, out=scores)


def _heads_first(x_TVd: Tensor) -> Tensor:
    return x_TVd.float().transpose(0, 1).contiguous()


def _gather_rows(x_NKAd: Tensor, group: BlockGroup, num_kv: int) -> Tensor:
    """Rows of a group in the order (block, head of its key/value head, slot): a float32 copy [V, R, d]."""
    x = x_NKAd[group.first : group.last]
    rows = x.unflatten(2, (num_kv, -1)).permute(2, 0, 3, 1, 4)
    return torch.empty(rows.shape, dtype=torch.float32, device=x.device).copy_(rows).view(num_kv, -1, x.shape[-1])


def _scatter_rows(out_NKAd: Tensor, rows_VRd: Tensor, group: BlockGroup) -> None:
    num_kv, size = rows_VRd.shape[0], out_NKAd.shape[1]
    target = out_NKAd[group.first : group.last].unflatten(2, (num_kv, -1)).permute(2, 0, 3, 1, 4)
    target.copy_(rows_VRd.view(num_kv, group.last - group.first, -1, size, rows_VRd.shape[-1]))


def _own_rows(x_NKVd: Tensor, group: BlockGroup) -> Tensor:
    """Keys or values of a group's own blocks, float32 [V*C, K, d]."""
    return x_NKVd[group.first : group.last].float().permute(2, 0, 1, 3).flatten(0, 1)


def _own_part(scores: Tensor, length: int, own_rows: Tensor) -> Tensor:
    return scores[..., length:].reshape(own_rows.shape[0], -1, own_rows.shape[1])


def _scatter_own(out_NKVd: Tensor, rows: Tensor, group: BlockGroup) -> None:
    target = out_NKVd[group.first : group.last].permute(2, 0, 1, 3)
    target.copy_(rows.view(target.shape))
