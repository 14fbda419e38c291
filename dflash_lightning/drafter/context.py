"""The drafter's KV cache while decoding: what each row's next block sees of its context.

Shapes: B rows, K slots a block, S new tokens, A query heads, V key/value heads, C cache slots, L slots that are looked
at, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

Pair = tuple[Tensor, Tensor]  # keys and values
Masks = dict[tuple[int | None, bool], Tensor | None]  # by window and causal block


class DraftContext:
    """Keys and values [B, V, C, d] of every layer; the token at position j of a row lies in the row's slot j.

    A block's own keys and values stand behind the row's context while it is drafted. The next states written there
    replace them, so nothing is ever taken out: a row's length says what counts.

    Args:
        batch_size: rows.
    """

    def __init__(self, batch_size: int) -> None:
        self.lengths = [0] * batch_size
        self._layers: list[Pair] = []

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Positions [B, count] of the next `count` tokens of every row."""
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device)

    def write(self, layer: int, pair: Pair, positions_BS: Tensor) -> None:
        """Put keys and values [B, S, V, d] of a layer where their positions say; lengths stay as they are."""
        needed = max(self.lengths) + positions_BS.shape[1]
        if layer == len(self._layers):
            rows, _, heads, size = pair[0].shape
            self._layers.append((pair[0].new_zeros(rows, heads, 0, size), pair[1].new_zeros(rows, heads, 0, size)))
        capacity = self._layers[layer][0].shape[2]
        if needed > capacity:
            # Half as much again, so that growing costs one copy a token all in all. Zeros: masked NaNs would spread.
            more = max(needed, capacity + capacity // 2) - capacity
            keys, values = self._layers[layer]
            self._layers[layer] = pad(keys, (0, 0, 0, more)), pad(values, (0, 0, 0, more))
        rows_B1 = torch.arange(len(self.lengths), device=positions_BS.device)[:, None]
        for cache, new in zip(self._layers[layer], pair, strict=True):
            cache[rows_B1, :, positions_BS] = new

    def advance(self, counts: Sequence[int]) -> None:
        """Of the tokens written last, the first `counts` of each row are its context from now on."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def retain(self, rows: Sequence[int]) -> None:
        """Keep `rows` in this order and forget the others."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(list(rows), device=self._layers[0][0].device)
        self._layers = [(keys[index], values[index]) for keys, values in self._layers]

    def masks(self, positions_BK: Tensor, kinds: Sequence[tuple[int | None, bool]]) -> Masks:
        """For each (window, causal block) of a drafter what `attend` needs: which slots a block sees, None for all.

        Slot k at position p sees its row's context and block: the slots j < length + K, with a window those of
        p - j < window, in a causal block those of j <= p.
        """
        masks: Masks = {}
        end = max(self.lengths) + positions_BK.shape[1]
        position_BK1 = positions_BK[:, :, None]
        for window, causal in kinds:
            if window is None and not causal and min(self.lengths) == max(self.lengths):
                masks[window, causal] = None
                continue
            slots_L = torch.arange(self._first(window), end, device=positions_BK.device)
            sees_BKL = slots_L <= (position_BK1 if causal else positions_BK[:, -1:, None])
            if window is not None:
                sees_BKL = sees_BKL & (position_BK1 - slots_L < window)
            masks[window, causal] = sees_BKL.expand(-1, positions_BK.shape[1], -1)[:, None]
        return masks

    def attend(self, layer: int, queries_BKAd: Tensor, window: int | None, mask: Tensor | None) -> Tensor:
        """Attention [B, K, A, d] of a block whose own keys and values have been written."""
        seen = slice(self._first(window), max(self.lengths) + queries_BKAd.shape[1])
        keys, values = (part[:, :, seen] for part in self._layers[layer])
        queries = queries_BKAd.transpose(1, 2).to(values.dtype)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def _first(self, window: int | None) -> int:
        # Slot 0 of the shortest row looks back furthest.
        return 0 if window is None else max(min(self.lengths) - window + 1, 0)
