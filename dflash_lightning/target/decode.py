"""The target's side of speculative decoding: rows side by side, a KV cache that takes tokens back, tapped states.

Shapes: B rows, S tokens of one forward, W cache slots, F = L_t*H hidden values, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_lightning.target.loading import decoder_of, layers_of
from dflash_lightning.target.tap import LayerTaps

# Kinds of layer whose state is a running summary: tokens cannot be taken out of it again.
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


class TargetDecoder:
    """Runs a causal LM token by token over a batch of rows and returns logits and tapped hidden states.

    Rows of any length lie right-aligned and without gaps in the cache, padding on their left only. A rejected token
    could also stay where it is, hidden by the attention mask, but transformers' masks of sliding and chunked layers
    count cache slots and not positions: each such hole would shorten the row's window.

    Args:
        model: a causal LM with all its layers.
        layer_ids: layers whose outputs the drafter reads.

    Raises:
        ValueError: the model has layers whose state cannot be taken back.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        config = model.config.get_text_config()
        recurrent = {t for t in getattr(config, "layer_types", None) or () if any(r in t for r in _RECURRENT)}
        if recurrent or getattr(model, "_is_stateful", False):
            layers = f"its {sorted(recurrent)} layers keep" if recurrent else "it keeps"
            raise ValueError(
                f"{type(model).__name__}: {layers} a running state that cannot be taken back after a rejected draft; "
                "decode with a serving engine instead"
            )
        self.model = model
        decoder = decoder_of(model)
        owner, name = layers_of(decoder, config.num_hidden_layers)
        self._taps = LayerTaps(getattr(owner, name), layer_ids)
        self.device: torch.device = next(model.parameters()).device
        self.reset()

    def check_batch(self, batch_size: int) -> None:
        """Raise ValueError where the model cannot decode so many rows of different lengths."""
        if batch_size > 1 and "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"batch_size={batch_size}: {type(self.model).__name__} takes no position_ids, without which rows of "
                "different lengths cannot share a forward; use 1"
            )

    def reset(self) -> None:
        """Forget all rows."""
        # Without the config every layer keeps its whole past, sliding ones too: what is taken back has never gone.
        self._cache = DynamicCache()
        self._lengths: list[int] = []

    @torch.inference_mode()
    def step(self, ids: Sequence[Sequence[int]], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Append tokens to every row: logits [B, S, V] in float32 and hidden states [B, S, F].

        The first step after `reset` takes rows of any length and pads them on the left, so a row's own are its last;
        later ones append as many tokens to every row. `last_only`: logits [B, 1, V] of the last token.
        """
        width = max(map(len, ids))
        if not self._lengths:
            self.check_batch(len(ids))
            self._lengths = [0] * len(ids)
        else:
            assert [len(row) for row in ids] == [width] * len(self._lengths)
        self._lengths = [length + len(row) for length, row in zip(self._lengths, ids, strict=True)]
        # The padding is hidden, so any id in range will do.
        ids_BS = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids], device=self.device)
        with warnings.catch_warnings():
            # transformers 5.24 prefers another keyword, which 5.16 does not know.
            warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
            out = self.model(
                input_ids=ids_BS,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **self._padding(width),
            )
        return out.logits.float(), torch.cat(self._taps.take(), dim=-1)

    def _padding(self, width: int) -> dict[str, Tensor]:
        """Mask and positions of rows of different lengths; without padding the model's own defaults cost less."""
        total = max(self._lengths)
        if min(self._lengths) == total:
            return {}
        slots_W = torch.arange(total, device=self.device)
        starts_B1 = total - torch.tensor(self._lengths, device=self.device)[:, None]
        positions_BW = (slots_W - starts_B1).clamp(min=0)
        return {"attention_mask": (slots_W >= starts_B1).long(), "position_ids": positions_BW[:, -width:]}

    def retain(self, rows: Sequence[int], drop: Sequence[int]) -> None:
        """Keep `rows` in this order and forget the others; take the last `drop` tokens out of each kept row.

        A crop where all rows stay and drop as much; else one copy of the cache.
        """
        total = max(self._lengths)
        everyone = list(rows) == list(range(len(self._lengths)))
        self._lengths = [self._lengths[row] - count for row, count in zip(rows, drop, strict=True)]
        if everyone and len(set(drop)) == 1:
            if drop[0]:
                self._cache.crop(-drop[0])
            return
        width = max(self._lengths)
        # Slot w of a kept row comes from slot w + shift; to the left of a row's first token anything may lie.
        shift_B1 = total - width - torch.tensor(list(drop), device=self.device)[:, None]
        slots_BW = (torch.arange(width, device=self.device) + shift_B1).clamp(min=0)
        rows_B1 = torch.tensor(list(rows), device=self.device)[:, None]
        layers: list[Any] = self._cache.layers
        for layer in layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys[rows_B1, :, slots_BW].transpose(1, 2)
                layer.values = layer.values[rows_B1, :, slots_BW].transpose(1, 2)
