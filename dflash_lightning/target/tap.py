"""Run the frozen target up to its last tapped layer and keep those layers' outputs.

Shapes: B rows, S padded length, T packed tokens, H hidden size, L_t tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dflash_lightning.target.loading import decoder_of, layers_of, load_model


class LayerTaps:
    """Keeps the outputs of chosen decoder layers of the last forward pass.

    Args:
        layers: the decoder's layer list.
        layer_ids: layers to keep, in the order in which `take` returns them.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._outputs: dict[int, Tensor] = {}
        for i in set(self.layer_ids):
            layers[i].register_forward_hook(self._keep(i))

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> list[Tensor]:
        """Outputs of the tapped layers, each [B, S, H]; they are not kept any longer."""
        outputs, self._outputs = self._outputs, {}
        return [outputs[i] for i in self.layer_ids]


class TappedTarget:
    """A target model that returns the outputs of chosen decoder layers and builds no logits.

    Layer id i means the output of decoder layer i counted from 0, before any final norm. Layers above the last tapped
    one are dropped: their memory is freed and they never run.

    Args:
        target: see `resolve_target`.
        layer_ids: layers to tap, in the order in which their outputs are laid side by side.
        last_hidden_state: tap the model's last layer too, as the final entry.
        device, dtype, attn_implementation, trust_remote_code: as for `load_model`.
    """

    def __init__(
        self,
        target: str,
        layer_ids: Sequence[int],
        *,
        last_hidden_state: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        model = load_model(
            target,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        self._init(model, layer_ids, last_hidden_state)

    @classmethod
    def wrap(cls, model: Any, layer_ids: Sequence[int], *, last_hidden_state: bool = False) -> TappedTarget:
        """Tap a model that is already loaded. It loses the layers above the last tapped one."""
        tapped = cls.__new__(cls)
        tapped._init(model, layer_ids, last_hidden_state)
        return tapped

    def _init(self, model: Any, layer_ids: Sequence[int], last_hidden_state: bool) -> None:
        config = model.config.get_text_config()
        total = config.num_hidden_layers
        out_of_range = [i for i in layer_ids if not 0 <= i < total]
        if out_of_range:
            raise ValueError(f"target_layer_ids={list(layer_ids)}: {out_of_range} not in 0..{total - 1}")
        self.tap_ids = (*layer_ids, total - 1) if last_hidden_state else tuple(layer_ids)
        self.decoder = decoder_of(model)
        owner, name = layers_of(self.decoder, total)
        layers = getattr(owner, name)[: max(self.tap_ids) + 1]
        setattr(owner, name, layers)
        self._layers = (owner, name)
        self.hidden_size: int = config.hidden_size
        self.dtype: torch.dtype = next(self.decoder.parameters()).dtype
        self.device: torch.device = next(self.decoder.parameters()).device
        self._taps = LayerTaps(layers, self.tap_ids)

    def compile(self) -> None:
        """Compile the decoder's layers; the hooks that tap them stay outside."""
        owner, name = self._layers
        for layer in getattr(owner, name):
            layer.compile(dynamic=True)

    @torch.inference_mode()
    def forward(self, ids_BS: Tensor) -> list[Tensor]:
        """Outputs of the tapped layers, each [B, S, H].

        Rows are right-padded. No attention mask is needed: causal layers never look at what stands to the right.
        """
        self.decoder(input_ids=ids_BS.to(self.device), use_cache=False)
        return self._taps.take()


def pad_rows(rows: Sequence[Sequence[int] | NDArray[np.integer]], pad_id: int = 0) -> Tensor:
    """Right-padded token ids, [B, S] int64. Padding is never read by the real tokens, so any id in range will do."""
    width = max(len(row) for row in rows)
    ids_BS = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids_BS[b, : len(row)] = torch.as_tensor(row)
    return ids_BS


def pack_hidden(taps: Sequence[Tensor], lengths: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Tapped outputs side by side without the padding, [T, len(taps)*H]; written into `out` if given."""
    B, S, H = taps[0].shape
    keep_T = torch.cat([torch.arange(b * S, b * S + n) for b, n in enumerate(lengths)]).to(taps[0].device)
    if out is None:
        out = torch.empty(len(keep_T), len(taps) * H, dtype=taps[0].dtype, device=taps[0].device)
    for i, tap in enumerate(taps):
        out[:, i * H : (i + 1) * H] = tap.reshape(B * S, H).index_select(0, keep_T)
    return out
