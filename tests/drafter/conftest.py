"""Small real batches and drafters for the tests of `dflash_lightning.drafter`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from dflash_lightning.batch import HiddenStateBatch
from dflash_lightning.drafter.config import build_draft_config
from dflash_lightning.drafter.layout import draw_layout
from dflash_lightning.drafter.model import DFlashDraftModel

REFERENCE = Path(__file__).parent.parent / "reference"
HIDDEN, VOCAB, MASK = 32, 96, 95


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference() -> dict:
    """The reference tensors by name, and the JSON under "json"."""
    tensors: dict = dict(load_file(REFERENCE / "dflash_reference.safetensors"))
    tensors["json"] = json.loads((REFERENCE / "dflash_reference.json").read_text())
    return tensors


@pytest.fixture(scope="session")
def target_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=8,
    )


def _make_batch(
    lengths, *, supervised=None, block_size=4, max_anchors=64, anchors=None, seed=0, tapped=2, num_blocks=None
) -> HiddenStateBatch:
    """Documents of the given lengths; `supervised` names the positions of the packed row (default all)."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    input_ids = torch.randint(0, MASK, (total,), generator=generator)
    loss_mask = torch.ones(total, dtype=torch.bool)
    if supervised is not None:
        loss_mask = torch.zeros(total, dtype=torch.bool)
        loss_mask[list(supervised)] = True
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    layout = draw_layout(
        input_ids, loss_mask, documents, positions, block_size=block_size, max_anchors=max_anchors, seed=seed
    )
    if anchors is not None:
        # Chosen anchors instead of drawn ones: of all eligible ones keep those.
        every = draw_layout(
            input_ids, loss_mask, documents, positions, block_size=block_size, max_anchors=total, seed=seed
        )
        rows = [every["anchors"][every["anchor_valid"]].tolist().index(a) for a in anchors]
        padding = (num_blocks or len(rows)) - len(rows)
        layout = {name: every[name][rows] for name in ("anchors", "anchor_valid", "labels", "label_mask")}
        layout = {
            name: torch.cat([value, value.new_zeros(padding, *value.shape[1:])]) for name, value in layout.items()
        }
        slots = layout["label_mask"].flatten().nonzero()[:, 0]
        layout["slot_index"] = torch.cat([slots, slots.new_full((-len(slots) % 256 or 256 * (len(slots) == 0),), -1)])
    hidden_states = torch.randn(total, tapped * HIDDEN, generator=generator)
    last = torch.randn(total, HIDDEN, generator=generator)
    return HiddenStateBatch(
        input_ids, hidden_states, loss_mask, documents, positions, **layout, last_hidden_state=last, num_tokens=total
    )


@pytest.fixture(scope="session")
def make_batch():
    return _make_batch


@pytest.fixture(scope="session")
def make_drafter(target_config):
    def make(block_size=4, seed=0, **options) -> DFlashDraftModel:
        torch.manual_seed(seed)
        options = {"num_layers": 2, "target_layer_ids": [1, 4], "mask_token_id": MASK, **options}
        model = DFlashDraftModel(build_draft_config(target_config, block_size=block_size, **options))
        # Larger than the initial weights, so that a wrong score or position shows.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
        return model

    return make


@pytest.fixture(scope="session")
def embed_blocks():
    """Embedding of anchors and mask tokens, [N, K, H]; the table is random but fixed."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))

    def embed(batch: HiddenStateBatch) -> torch.Tensor:
        tokens = torch.full_like(batch.labels, MASK)
        tokens[:, 0] = batch.input_ids[batch.anchors]
        return table[tokens]

    return embed
