"""Faults that users of this field reported (FIELD_FAULTS A), the part that needs module, producer and trainer.

A1, A3-A7, A10, A12, A14 are in tests/drafter; A8 is in test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_lightning.batch import BatchSpec, Cursor
from dflash_lightning.callbacks import DrafterCheckpoint, find_last_checkpoint
from dflash_lightning.data import ensure_rows, load_rows
from dflash_lightning.loader import HiddenStateLoader, LoaderConfig
from dflash_lightning.producer.plan import BatchPlan
from dflash_lightning.producer.produce import ProducerConfig
from dflash_lightning.producer.slots import SlotShape
from dflash_lightning.producer.source import InlineSource
from dflash_lightning.target.loading import load_frozen_head
from dflash_lightning.target.resolve import load_tokenizer


@pytest.fixture
def rows(tiny_target: str, write_chats: Callable[..., str], tmp_path: Path) -> Path:
    return ensure_rows([write_chats(12)], load_tokenizer(tiny_target), tmp_path / "rows", max_seq_len=128)


def inline(tiny_target: str, rows: Path, *, last: bool = False) -> InlineSource:
    shape = SlotShape(256, 64, 32 if last else 0, "float32")
    return InlineSource(ProducerConfig(tiny_target, (1, 5), last, {"train": str(rows)}, 128, shape), "cpu")


def load(source: InlineSource, rows: Path, spec: BatchSpec):
    lengths = [len(r) for r in load_rows(rows)["input_ids"]]
    plan = BatchPlan(torch.tensor(lengths).numpy(), token_budget=256, num_buckets=1)
    config = LoaderConfig("train", 0, 1, 1, 0, 2)
    return HiddenStateLoader(source, lambda e: plan, spec, config, lambda: Cursor(0, 0, 0), torch.device("cpu"))


def test_a02_states_ids_and_mask_stay_in_step(tiny_target: str, rows: Path) -> None:
    source = inline(tiny_target, rows)
    # A target whose state at position t is the token at t.
    source._producer.target.forward = lambda ids: [ids.float()[..., None].expand(-1, -1, 32)] * 2
    dataset = load_rows(rows)
    batches = list(load(source, rows, BatchSpec((1, 5), False, 4, 64, 64)))
    assert sorted(r for b in batches for r in b.row_ids) == list(range(12))
    for batch in batches:
        assert torch.equal(batch.hidden_states[:, 0].long(), batch.input_ids)
        stored = [dataset[r] for r in batch.row_ids]
        assert batch.input_ids.tolist() == [t for row in stored for t in row["input_ids"]]
        assert batch.loss_mask.tolist() == [bool(m) for row in stored for m in row["loss_mask"]]
        starts = (batch.positions == 0).nonzero().flatten().tolist()
        assert len(starts) == len(batch.row_ids)
        for n, anchor in enumerate(batch.anchors[batch.anchor_valid].tolist()):
            for k in batch.label_mask[n].nonzero().flatten().tolist():
                assert batch.labels[n, k] == batch.input_ids[anchor + k]
                assert batch.loss_mask[anchor + k]


def test_a09_norm_weights_move_under_bf16_and_after_resume(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(40)
    seen = []
    for steps in (15, 30):
        folder = seen[-1][1] if seen else None
        options = {"trainer_precision": "bf16-mixed", "trainer_max_steps": steps, "model_scheduler": None}
        trainer, module, data = make_run(train, callbacks=[DrafterCheckpoint(5)], **options)
        checkpoint = find_last_checkpoint(folder) if folder else None
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        norms = {n: p.detach().clone() for n, p in module.drafter.named_parameters() if p.ndim == 1}
        assert all(p.dtype == torch.float32 for p in module.drafter.parameters())
        assert all((weight != 1.0).all() for weight in norms.values())
        # 6e-4 a step moves a bf16 number near 1 (steps of 2^-8) not at all.
        assert any((weight - 1).abs().max() > 4e-3 for weight in norms.values())
        seen.append((norms, Path(trainer.default_root_dir) / "checkpoints"))
    assert all(not torch.equal(seen[0][0][n], w) for n, w in seen[1][0].items())


def test_a11_the_targets_distribution_comes_from_its_normed_state(tiny_target: str, rows: Path) -> None:
    source = inline(tiny_target, rows, last=True)
    batch = next(iter(load(source, rows, BatchSpec((1, 5), True, 4, 64, 64))))
    assert batch.last_hidden_state is not None
    head = load_frozen_head(tiny_target, dtype="float32")
    assert head.final_norm is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.no_grad():
        logits = head.lm_head(head.final_norm(batch.last_hidden_state))
        for document in range(len(batch.row_ids)):
            inside = batch.document_ids == document
            expected = model(batch.input_ids[inside][None]).logits[0]
            torch.testing.assert_close(logits[inside], expected, atol=1e-4, rtol=1e-4)


def test_a11_a_target_loss_asks_the_producer_for_the_last_state(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(30)
    trainer, module, data = make_run(train, model_loss={"ce": 1.0, "kl": 0.5}, trainer_max_steps=2)
    assert module.batch_spec().last_hidden_state
    trainer.fit(module, datamodule=data)
    trainer, module, data = make_run(train, trainer_max_steps=1)
    assert not module.batch_spec().last_hidden_state, "hard labels do not need it, so it is not shipped"


def test_a13_the_optimizer_holds_the_drafter_and_nothing_else(make_run, write_chats: Callable[..., str]) -> None:
    trainer, module, data = make_run(write_chats(20), trainer_max_steps=1)
    trainer.fit(module, datamodule=data)
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in module.drafter.parameters()}
    assert {id(p) for p in module.parameters()} == held, "the frozen head is no part of the module"
