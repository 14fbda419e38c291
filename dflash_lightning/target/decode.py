"""The target's side of speculative decoding: one sequence, a KV cache that can be cropped, tapped hidden states."""

from __future__ import annotations

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
    """Runs a causal LM token by token over one sequence and returns logits and tapped hidden states.

    Args:
        model: a causal LM with all its layers.
        layer_ids: layers whose outputs the drafter reads.

    Raises:
        ValueError: the model has layers whose state cannot be cropped.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        config = model.config.get_text_config()
        recurrent = {t for t in getattr(config, "layer_types", None) or () if any(r in t for r in _RECURRENT)}
        if recurrent:
            raise ValueError(
                f"{type(model).__name__}: its {sorted(recurrent)} layers keep a running state that cannot be taken "
                "back after a rejected draft; decode with a serving engine instead"
            )
        self.model = model
        decoder = decoder_of(model)
        owner, name = layers_of(decoder, config.num_hidden_layers)
        self._taps = LayerTaps(getattr(owner, name), layer_ids)
        self.device: torch.device = next(model.parameters()).device
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        # Without the config every layer keeps its whole past, sliding ones too: a crop never needs what has gone.
        self._cache = DynamicCache()

    @torch.inference_mode()
    def step(self, ids: Sequence[int], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Append `ids`; logits [S, V] in float32 (of the last alone with `last_only`), hidden states [S, F]."""
        ids_1S = torch.tensor([list(ids)], device=self.device)
        with warnings.catch_warnings():
            # transformers 5.24 prefers another keyword, which 5.16 does not know.
            warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
            out = self.model(
                input_ids=ids_1S, past_key_values=self._cache, use_cache=True, logits_to_keep=1 if last_only else 0
            )
        hidden_SF = torch.cat([tap[0] for tap in self._taps.take()], dim=-1)
        return out.logits[0].float(), hidden_SF

    def drop(self, count: int) -> None:
        """Take the last `count` tokens out of the sequence."""
        if count:
            self._cache.crop(-count)
