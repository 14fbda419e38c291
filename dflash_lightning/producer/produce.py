"""From row numbers to packed hidden states: what a worker does with a batch, and what an in-process producer does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash_lightning.producer.slots import SlotShape, SlotViews
from dflash_lightning.profiling import span
from dflash_lightning.target.tap import TappedTarget, pack_hidden, pad_rows


@dataclass(frozen=True)
class ProducerConfig:
    """All that a producer needs to know; travels to workers as JSON."""

    target: str
    layer_ids: tuple[int, ...]
    last_hidden_state: bool
    rows: dict[str, str]  # stream name -> folder of its Arrow rows
    max_seq_len: int
    shape: SlotShape
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    num_threads: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProducerConfig:
        return cls(**{**data, "layer_ids": tuple(data["layer_ids"]), "shape": SlotShape(**data["shape"])})


class RowProducer:
    """Holds one target replica on one device and the rows, and fills slots.

    Args:
        config: see `ProducerConfig`.
        device: where the target runs.
    """

    def __init__(self, config: ProducerConfig, device: torch.device | str) -> None:
        import datasets

        self.config = config
        self.rows = {name: datasets.load_from_disk(path) for name, path in config.rows.items()}
        self.target = TappedTarget(
            config.target,
            config.layer_ids,
            last_hidden_state=config.last_hidden_state,
            device=device,
            dtype=config.shape.torch_dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )

    def produce(self, stream: str, numbers: Sequence[int], out: SlotViews) -> list[int]:
        """Run the target over rows `numbers` of `stream` and write the packed result into `out`.

        Returns:
            Tokens of each row, in order; their sum is the number of slot rows that were written.
        """
        with span("target.load_batch"):
            loaded = self.rows[stream][list(numbers)]
            ids = [row[: self.config.max_seq_len] for row in loaded["input_ids"]]
            masks = [row[: self.config.max_seq_len] for row in loaded["loss_mask"]]
            lengths = [len(row) for row in ids]
            total = sum(lengths)
            assert total <= self.config.shape.max_tokens, "the plan's token budget is the slot's size"
            ids_BS = pad_rows(ids)
            out.input_ids[:total] = torch.cat([torch.as_tensor(row, dtype=torch.int32) for row in ids])
            out.loss_mask[:total] = torch.cat([torch.as_tensor(row, dtype=torch.uint8) for row in masks])
        with span("target.model_forward"):
            taps = self.target.forward(ids_BS)
        with span("target.pack_hidden"), torch.inference_mode():
            views = out.head(total)
            if views.last_hidden_state is not None:
                pack_hidden(taps[-1:], lengths, views.last_hidden_state)
                taps = taps[:-1]
            pack_hidden(taps, lengths, views.hidden_states)
        return lengths
