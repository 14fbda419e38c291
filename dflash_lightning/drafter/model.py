"""The DFlash drafter: a few Qwen3 layers whose attention reads the target's hidden states and the slots' own block.

Parameter names and shapes are those of the released z-lab checkpoints. Embedding and LM head are the target's.
Shapes: N blocks, K slots a block, T packed context tokens, B rows that decode, S tokens of each, H hidden size,
F = L_t*H tapped features, A query heads, V key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_lightning.drafter.attention import attention_mask, block_attention, context_padding, resolve_backend
from dflash_lightning.drafter.config import sliding_causal, target_layer_ids
from dflash_lightning.drafter.context import DraftContext, Masks
from dflash_lightning.drafter.layout import BlockLayout

Rotation = tuple[Tensor, Tensor]  # cosines and sines, float32 [..., d]


class _ScaledNorm(torch.autograd.Function):
    """Keeps its input and one number a row for the backward; autograd would keep the normed rows as well."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x_float = x.float()
        scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        # With float32 weights over bf16 states (autocast) the product is float32; the linear layers behind would each
        # make and keep a bf16 copy of it, so make it once.
        return (weight * (x_float * scale).to(x.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normed = x.float() * scale
        grad = grad.float()
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        normed_grad = grad * weight
        along = (normed_grad * normed).mean(-1, keepdim=True)
        return normed_grad.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), weight_grad, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping the two inputs only."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        (grad,) = grads
        return torch.ops.aten.silu_backward(grad * up, gate), nn.functional.silu(gate).mul_(grad)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, scaled after the cast back, as Qwen3 does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _ScaledNorm.apply(x, self.weight, self.eps))


class DFlashAttention(nn.Module):
    """Qwen3 attention: queries from the block, keys and values from the context features and the block."""

    def __init__(self, config: Qwen3Config, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        assert config.layer_types is not None
        assert config.num_key_value_heads is not None
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.window = config.sliding_window if config.layer_types[layer_index] == "sliding_attention" else None
        self.causal_block = self.window is not None and sliding_causal(config)
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of `x` [..., H], each [..., V, d]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        return _rotate(self.k_norm(keys), rotation), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, x_NKH: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], layout: BlockLayout, backend: str
    ) -> Tensor:
        queries = _rotate(self.q_norm(self.q_proj(x_NKH).unflatten(-1, (-1, self.head_dim))), rotation)
        out_NKAd = block_attention(
            queries,
            *context,
            *self.keys_values(x_NKH, rotation),
            layout,
            window=self.window,
            causal_block=self.causal_block,
            backend=backend,
        )
        return self.o_proj(out_NKAd.flatten(2))

    def decode(
        self, x_BKH: Tensor, rotation: Rotation, context: DraftContext, positions_BK: Tensor, masks: Masks
    ) -> Tensor:
        """One block a row, behind the row's context; `masks` as `DraftContext.masks` makes them."""
        queries = _rotate(self.q_norm(self.q_proj(x_BKH).unflatten(-1, (-1, self.head_dim))), rotation)
        context.write(self.layer_index, self.keys_values(x_BKH, rotation), positions_BK)
        mask = masks[self.window, self.causal_block]
        return self.o_proj(context.attend(self.layer_index, queries, self.window, mask).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


class DFlashLayer(nn.Module):
    """One pre-norm layer; the context enters its attention only, without the layer's input norm."""

    def __init__(self, config: Qwen3Config, layer_index: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x_NKH: Tensor,
        features_TH: Tensor,
        block_rotation: Rotation,
        context_rotation: Rotation,
        layout: BlockLayout,
        backend: str,
    ) -> Tensor:
        context = self.self_attn.keys_values(features_TH, context_rotation)
        x_NKH = x_NKH + self.self_attn(self.input_layernorm(x_NKH), block_rotation, context, layout, backend)
        return x_NKH + self.mlp(self.post_attention_layernorm(x_NKH))

    def decode(
        self, x_BKH: Tensor, rotation: Rotation, context: DraftContext, positions_BK: Tensor, masks: Masks
    ) -> Tensor:
        """The layer on one block a row, whose context is in the cache."""
        x_BKH = x_BKH + self.self_attn.decode(self.input_layernorm(x_BKH), rotation, context, positions_BK, masks)
        return x_BKH + self.mlp(self.post_attention_layernorm(x_BKH))


class DFlashDraftModel(nn.Module):
    """The drafter. `forward` trains on many blocks at once; `extend_context` and `decode_blocks` decode."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        hidden = config.hidden_size
        self.fc = nn.Linear(len(target_layer_ids(config)) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        # Not a submodule: `.to(torch.bfloat16)` must not round the frequencies, nor `to_empty` lose them.
        self._rotary: dict[torch.device, Qwen3RotaryEmbedding] = {}
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def context_features(self, hidden_TF: Tensor) -> Tensor:
        """Fuse the tapped layers, `hidden_norm(fc(hidden))`: what every layer's context keys and values come from."""
        return self.hidden_norm(self.fc(self._cast(hidden_TF)))

    def forward(
        self, block_embeddings_NKH: Tensor, hidden_TF: Tensor, layout: BlockLayout, *, attention: str = "auto"
    ) -> Tensor:
        """Final-normed states of every slot, [N, K, H], ready for the target's LM head.

        `block_embeddings`: the target's embedding of the anchor token in slot 0 and of the mask token in the others.
        Under autocast their dtype is that of the residual stream.
        """
        backend = resolve_backend(attention, block_embeddings_NKH.device)
        self.make_masks(layout, backend)
        padding = context_padding(layout.num_context, backend)
        features_TH = nn.functional.pad(self.context_features(hidden_TF), (0, 0, 0, padding))
        context_rotation = self._rotation(nn.functional.pad(layout.positions, (0, padding)))
        block_rotation = self._rotation(layout.block_positions)
        x_NKH = self._cast(block_embeddings_NKH)
        for layer in self._layers():
            inputs = (x_NKH, features_TH, block_rotation, context_rotation, layout, backend)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_NKH = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                x_NKH = layer(*inputs)
        return self.norm(x_NKH)

    def mask_kinds(self) -> list[tuple[int | None, bool]]:
        """The (window, causal block) pairs that the layers use, each once."""
        kinds = {(layer.self_attn.window, layer.self_attn.causal_block): None for layer in self._layers()}
        return list(kinds)

    def make_masks(self, layout: BlockLayout, attention: str = "auto") -> None:
        """Make the layout's masks, one a kind of layer. `forward` does it when needed; call it before to time it."""
        for window, causal_block in self.mask_kinds():
            attention_mask(layout, window, causal_block, resolve_backend(attention, layout.anchors.device))

    def extend_context(self, context: DraftContext, hidden_BSF: Tensor, counts: Sequence[int]) -> None:
        """Append the target's states to each row's context: of S states a row the first `counts` count."""
        features_BSH = self.context_features(hidden_BSF)
        positions_BS = context.positions(hidden_BSF.shape[1], hidden_BSF.device)
        rotation = self._rotation(positions_BS)
        for index, layer in enumerate(self._layers()):
            context.write(index, layer.self_attn.keys_values(features_BSH, rotation), positions_BS)
        context.advance(counts)

    def decode_blocks(self, block_embeddings_BKH: Tensor, context: DraftContext) -> Tensor:
        """Final-normed states [B, K, H] of the block right behind each row's context."""
        positions_BK = context.positions(block_embeddings_BKH.shape[1], block_embeddings_BKH.device)
        rotation, masks = self._rotation(positions_BK), context.masks(positions_BK, self.mask_kinds())
        x_BKH = self._cast(block_embeddings_BKH)
        for layer in self._layers():
            x_BKH = layer.decode(x_BKH, rotation, context, positions_BK, masks)
        return self.norm(x_BKH)

    def _layers(self) -> Iterator[DFlashLayer]:
        return cast(Iterator[DFlashLayer], iter(self.layers))

    def _cast(self, x: Tensor) -> Tensor:
        # Autocast casts inputs itself; a cast up here would first double the memory of bf16 hidden states.
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.norm.weight.dtype)

    def _rotation(self, positions: Tensor) -> Rotation:
        device = positions.device
        if device not in self._rotary:
            # The library's own, so that every `rope_parameters` form equals what a Qwen3 model computes.
            self._rotary[device] = Qwen3RotaryEmbedding(self.config).to(device)
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = self._rotary[device](like, positions.reshape(1, -1))
        return tuple(part.reshape(*positions.shape, part.shape[-1]) for part in (cos, sin))


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding (half-split form) of `x` [..., heads, d], computed in float32."""
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
