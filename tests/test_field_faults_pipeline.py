"""Faults that users of this field reported (FIELD_FAULTS B, D, E), the part that needs trainer, producers or files.

B1, B2, B4 and B8 are in target/test_target.py; B5, B6, D1, D2, D7, D8 in producer/test_pool.py; D4 and E9 in
test_cli.py; D5 in test_layout_rules.py; E1, E2, E3, E10, E11, E13 in test_training.py; E5, E6, E12, E17, E18 in
test_ranks.py; E8 (a stage that one rank alone has) in callbacks/.
D6 cannot occur: what crosses processes lies in host memory, never in a CUDA tensor.
E16 cannot occur: batches are planned ahead, no packer holds a row back.
E20 is held by ProfileStats (test_profiling.py). E21 cannot occur: batch sizes come from the plan.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from dflash_lightning.callbacks import DrafterCheckpoint, find_last_checkpoint
from dflash_lightning.drafter.config import default_target_layer_ids
from dflash_lightning.drafter.weights import load_drafter
from dflash_lightning.producer.slots import SlotMemory, SlotShape

from .conftest import read_scalars
from .test_training import Crash, Record, run


def test_b03_a_drafter_without_layer_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = {"block_size": 4, "dflash_config": {"mask_token_id": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no dflash_config\.target_layer_ids"):
        load_drafter(tmp_path)


def test_b07_a_tiny_target_is_refused_and_slots_fit_exactly() -> None:
    with pytest.raises(ValueError, match="target of 4 layers"):
        default_target_layer_ids(4, 5)
    taps, hidden, tokens = 5, 96, 1024
    shape = SlotShape(tokens, taps * hidden, 0, "bfloat16")
    assert shape.hidden_bytes == taps * hidden * tokens * 2


def test_d03_max_steps_with_a_full_queue_returns(make_run, write_chats: Callable[..., str]) -> None:
    trainer, module, data = make_run(write_chats(60), trainer_max_steps=2, data_target_devices=["cpu"])
    before = set(threading.enumerate())

    class WaitUntilFull(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            deadline = time.monotonic() + 20
            while data.queue_state() != (3, 3) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.pids = [w.pid for w in data.source.workers]

    wait = WaitUntilFull()
    trainer.callbacks.append(wait)
    trainer.fit(module, datamodule=data)
    assert not any(Path(f"/proc/{pid}").exists() for pid in wait.pids)
    assert not [t for t in threading.enumerate() if t.name.startswith("dflash") and t not in before]


def test_d09_what_is_announced_is_whole() -> None:
    memory = SlotMemory(SlotShape(64, 64, 0, "float32"), 4)
    announced: list[tuple[int, int]] = []

    def write() -> None:
        for number in range(200):
            memory.views(number % 4).hidden_states.fill_(number)
            announced.append((number, number % 4))
            while len(announced) > 3:
                time.sleep(0)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    read = 0
    while read < 200:
        if announced:
            number, slot = announced[0]
            assert (memory.views(slot).hidden_states == number).all()
            announced.pop(0)
            read += 1
    thread.join(5)


def test_e04_dropped_rows_leave_validation_on(make_run, write_chats: Callable[..., str]) -> None:
    train, val = write_chats(30), write_chats(8, "val.jsonl", offset=300)
    trainer, module, data = make_run(train, data_val=val, trainer_max_steps=-1, trainer_max_epochs=2)

    class DropRows(Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            producer = data.source._producer
            forward = producer.target.forward

            def broken(ids):
                taps = [tap.clone() for tap in forward(ids)]
                taps[0][0, 0, 0] = float("nan")
                return taps

            producer.target.forward = broken

    trainer.callbacks.append(DropRows())
    trainer.fit(module, datamodule=data)
    assert len(read_scalars(trainer.default_root_dir)["val/loss"]) == 2


def test_e07_one_point_an_optimizer_step_under_accumulation(make_run, write_chats: Callable[..., str]) -> None:
    _, folder = run(make_run, write_chats(60), 3, name="run", trainer_accumulate_grad_batches=4)
    scalars = read_scalars(folder)
    for tag in ("train/loss", "train/lr", "train/grad_norm"):
        assert [step for step, _ in scalars[tag]] == [1, 2, 3]


def test_e14_rates_and_moments_equal_the_uninterrupted_run(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(60)

    def final(name: str) -> dict:
        return torch.load(find_last_checkpoint(folders[name] / "checkpoints"), weights_only=True)

    folders = {}
    _, folders["whole"] = run(make_run, train, 10, name="whole")
    _, folders["cut"] = run(make_run, train, 10, name="cut", crash=4)
    resumed = find_last_checkpoint(folders["cut"] / "checkpoints")
    _, folders["cut"] = run(make_run, train, 10, name="cut", ckpt=resumed)
    whole, cut = final("whole"), final("cut")
    assert whole["lr_schedulers"] == cut["lr_schedulers"]
    for index, state in whole["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            other = cut["optimizer_states"][0]["state"][index][key]
            assert other.dtype == value.dtype == torch.float32
            assert torch.equal(other, value)


def test_e15_a_save_inside_an_accumulation_window_resumes_exactly(make_run, write_chats, tmp_path: Path) -> None:
    train = write_chats(60)
    options = {"trainer_accumulate_grad_batches": 4}

    class SaveInside(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    whole, _ = run(make_run, train, 4, name="whole", **options)
    trainer, module, data = make_run(train, callbacks=[SaveInside(), Crash(2)], trainer_max_steps=4, **options)
    with pytest.raises(RuntimeError, match="crash"):
        trainer.fit(module, datamodule=data)
    rest, _ = run(make_run, train, 4, name="rest", ckpt=tmp_path / "inside.ckpt", **options)
    assert rest.rows == whole.rows[4:], "the window starts again at its first batch"
    assert rest.losses == whole.losses[4:]


def test_e19_no_stray_validation_after_resume(make_run, write_chats: Callable[..., str]) -> None:
    train, val = write_chats(60), write_chats(8, "val.jsonl", offset=300)
    options = {"data_val": val, "trainer_val_check_interval": 4, "trainer_check_val_every_n_epoch": None}
    _, folder = run(make_run, train, 12, name="cut", crash=5, every=4, **options)
    _, folder = run(make_run, train, 12, name="cut", ckpt=folder / "checkpoints" / "step=4.ckpt", every=4, **options)
    steps = [step for step, _ in read_scalars(folder)["val/loss"]]
    assert steps[-2:] == [8, 12]
    assert set(steps) <= {4, 8, 12}


def test_a_best_checkpoint_can_be_monitored(make_run, write_chats: Callable[..., str], tmp_path: Path) -> None:
    train, val = write_chats(60), write_chats(8, "val.jsonl", offset=300)
    best = ModelCheckpoint(tmp_path / "best", monitor="val/acceptance_length", mode="max")
    options = {"data_val": val, "trainer_val_check_interval": 2, "trainer_check_val_every_n_epoch": None}
    trainer, module, data = make_run(train, callbacks=[best, DrafterCheckpoint(3), Record()], **options)
    trainer.fit(module, datamodule=data)
    assert best.best_model_score is not None
    assert load_drafter(best.best_model_path).config.block_size == 4
