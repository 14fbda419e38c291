"""Whole small runs: what they log and save, and that resume continues exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from dflash_lightning.batch import Cursor
from dflash_lightning.callbacks import DrafterCheckpoint, StageProfilerCallback, find_last_checkpoint
from dflash_lightning.optim import MuonAdamW
from dflash_lightning.schedules import HiddenStateNoise

from .conftest import read_scalars


class Record(Callback):
    """Loss, row ids and cursor of every batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows: list[tuple[int, ...]] = []
        self.anchors: list[list[int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rows.append(batch.row_ids)
        self.anchors.append(batch.anchors.tolist())


class Crash(Callback):
    """Raises before the batch that follows optimizer step `step`: nothing of a clean end is run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


def run(
    make_run, train: str, steps: int, *, name: str, ckpt=None, every: int = 2, crash: int | None = None, **options
) -> tuple[Record, Path]:
    record = Record()
    callbacks = [record, DrafterCheckpoint(every_n_train_steps=every)]
    if crash is not None:
        callbacks.append(Crash(crash))
    trainer, module, data = make_run(train, callbacks=callbacks, run=name, trainer_max_steps=steps, **options)
    fit = {"datamodule": data, "ckpt_path": ckpt, "weights_only": True if ckpt else None}
    if crash is None:
        trainer.fit(module, **fit)
    else:
        with pytest.raises(RuntimeError, match="crash"):
            trainer.fit(module, **fit)
    return record, Path(trainer.default_root_dir)


def test_e10_e11_a_run_logs_and_saves_what_it_promises(make_run, write_chats: Callable[..., str]) -> None:
    train, val = write_chats(60), write_chats(12, "val.jsonl", offset=500)
    callbacks = [DrafterCheckpoint(every_n_train_steps=2), StageProfilerCallback(profile_interval=0.001)]
    options = {"data_val": val, "trainer_val_check_interval": 3, "trainer_check_val_every_n_epoch": None}
    trainer, module, data = make_run(train, callbacks=callbacks, **options)
    before = {n: p.clone() for n, p in module.drafter.named_parameters()}
    trainer.fit(module, datamodule=data)
    assert all(not torch.equal(p, before[n]) for n, p in module.drafter.named_parameters()), "every weight is trained"

    scalars = read_scalars(trainer.default_root_dir)
    for tag in ("train/loss", "train/accuracy", "train/acceptance_length", "train/grad_norm", "train/lr"):
        assert [step for step, _ in scalars[tag]] == [1, 2, 3, 4, 5, 6], tag
    for tag in ("val/loss", "val/accuracy", "val/acceptance_length"):
        assert [step for step, _ in scalars[tag]] == [3, 6], tag
        assert tag in trainer.callback_metrics, "ModelCheckpoint can monitor it"
    assert all(1.0 <= v <= 4.0 for _, v in scalars["train/acceptance_length"])
    for stage in ("drafter.queue_wait", "drafter.forward", "drafter.backward", "drafter.optimizer_step"):
        assert scalars[f"profile/avg_ms/{stage}"]
        assert 0 <= scalars[f"profile/share/{stage}"][-1][1] <= 1.01
    for stage in ("target.model_forward", "target.pack_hidden", "dflash.layers", "dflash.loss", "dflash.block_layout"):
        assert f"profile/total_s/{stage}" in scalars
    assert scalars["pipeline/tokens_per_s"][-1][1] > 0

    checkpoint = find_last_checkpoint(Path(trainer.default_root_dir) / "checkpoints")
    assert checkpoint is not None
    assert (checkpoint.parent / "last.ckpt").resolve() == checkpoint.resolve()
    content = torch.load(checkpoint, weights_only=True)
    assert content["global_step"] == 6
    trainable = sum(p.numel() * p.element_size() for p in module.drafter.parameters())
    assert checkpoint.stat().st_size < 4 * trainable + 200_000, "no frozen weight of the target is in the file"
    assert {k.split(".")[0] for k in content["state_dict"]} == {"drafter", "train_metrics"}


@pytest.mark.parametrize("options", [{}, {"data_reuse": 3}, {"trainer_accumulate_grad_batches": 2}], ids=str)
def test_e13_a_resumed_run_equals_the_uninterrupted_one(make_run, write_chats, options: dict) -> None:
    train = write_chats(40)
    options |= {"model_noise": _noise()}
    whole, _ = run(make_run, train, 12, name="whole", **options)
    per_step = options.get("trainer_accumulate_grad_batches", 1)
    first, folder = run(make_run, train, 12, name="cut", crash=5, every=5, **options)
    rest, _ = run(make_run, train, 12, name="cut", ckpt=find_last_checkpoint(folder / "checkpoints"), **options)
    assert len(whole.losses) == 12 * per_step
    assert first.rows + rest.rows == whole.rows
    assert first.anchors + rest.anchors == whole.anchors
    assert rest.losses == whole.losses[5 * per_step :], "bit for bit"


def _noise():
    from dflash_lightning.schedules import HiddenStateNoise

    return HiddenStateNoise(strength=0.05, end=0.01, distribution="uniform", schedule="linear", steps=12)


def test_e01_e02_no_row_is_lost_or_repeated_over_epochs(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(30)
    options = {"trainer_max_epochs": 2}
    whole, _ = run(make_run, train, -1, name="whole", **options)
    batches = len(whole.rows) // 2
    for epoch in range(2):
        rows = [r for batch in whole.rows[epoch * batches : (epoch + 1) * batches] for r in batch]
        assert sorted(rows) == list(range(30))
    assert whole.rows[:batches] != whole.rows[batches:]
    for stop in (batches - 1, batches, batches + 1):  # before, at and after the end of an epoch
        first, folder = run(make_run, train, -1, name=f"cut{stop}", crash=stop, every=1, **options)
        checkpoint = find_last_checkpoint(folder / "checkpoints")
        rest, _ = run(make_run, train, -1, name=f"cut{stop}", ckpt=checkpoint, every=1, **options)
        assert first.rows + rest.rows == whole.rows, stop


def test_e03_the_cursor_counts_trained_batches_not_pulled_ones(make_run, write_chats: Callable[..., str]) -> None:
    _, folder = run(make_run, write_chats(40), 3, name="run", data_prefetch=4)
    state = torch.load(find_last_checkpoint(folder / "checkpoints"), weights_only=True)
    saved = state["HiddenStateDataModule"]
    assert (saved["epoch"], saved["batch"], saved["pass"]) == (0, 3, 0)


def test_a_changed_plan_is_refused_by_name_or_starts_the_epoch_again(make_run, write_chats) -> None:
    train = write_chats(40)
    _, folder = run(make_run, train, 3, name="run")
    checkpoint = find_last_checkpoint(folder / "checkpoints")
    with pytest.raises(ValueError, match=r"data\.token_budget is 300 now; the checkpoint had \d+"):
        run(make_run, train, 6, name="run", ckpt=checkpoint, data_token_budget=300)
    with pytest.raises(ValueError, match=r"data\.reuse is 2 now; the checkpoint had 1"):
        run(make_run, train, 6, name="run", ckpt=checkpoint, data_reuse=2)
    options = {"data_token_budget": 300, "data_on_plan_change": "restart_epoch"}
    with pytest.warns(UserWarning, match="starts again"):
        record, _ = run(make_run, train, 5, name="run", ckpt=checkpoint, **options)
    fresh, _ = run(make_run, train, 2, name="fresh", data_token_budget=300)
    assert record.rows == fresh.rows


def test_changed_optimizer_settings_win_at_resume_and_are_named(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(60)
    _, folder = run(make_run, train, 10, name="cut", crash=4)
    checkpoint = find_last_checkpoint(folder / "checkpoints")
    optimizer = {"model_optimizer": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.3, fused=True)}
    with pytest.warns(UserWarning, match=r"weight_decay is 0\.3 now; the checkpoint had 0\.01"):
        _, folder = run(make_run, train, 20, name="cut", ckpt=checkpoint, **optimizer)
    rates = dict(read_scalars(folder)["train/lr"])
    assert max(rate for step, rate in rates.items() if step > 6) <= 1e-5
    assert rates[20] < 1e-7, "the schedule ends with the new max_steps"


def rates(folder: Path) -> dict[int, float]:
    return dict(read_scalars(folder)["train/lr"])


def adamw(lr: float = 1e-3):
    return {"model_optimizer": lambda p: torch.optim.AdamW(p, lr=lr, fused=True)}


def test_changed_scheduler_settings_win_at_resume_and_are_named(make_run, write_chats: Callable[..., str]) -> None:
    """Schedulers keep their arguments in their state: what the user changed must come through it."""
    train = write_chats(60)

    def steps(size: int, factor: float):
        return {"model_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=size, gamma=factor)}

    _, folder = run(make_run, train, 10, name="cut", crash=4, **adamw(), **steps(100, 0.1))
    checkpoint = find_last_checkpoint(folder / "checkpoints")
    with pytest.warns(UserWarning, match=r"model\.scheduler\.step_size is 5 now; the checkpoint had 100") as caught:
        _, folder = run(make_run, train, 10, name="cut", ckpt=checkpoint, **adamw(2e-3), **steps(5, 0.5))
    named = [str(w.message) for w in caught if "now; the checkpoint had" in str(w.message)]
    wanted = {"model.scheduler.step_size", "model.scheduler.gamma", "model.optimizer.lr"}
    assert {text.split(" is ")[0] for text in named} == wanted
    found = rates(folder)
    assert found[4] == pytest.approx(1e-3)
    assert found[5] == pytest.approx(1e-3), "the rate that the step ends with: the fifth step crosses the boundary"
    assert found[6] == pytest.approx(1e-3)
    assert found[10] == pytest.approx(5e-4)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=20),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[3],
        ),
        None,
    ],
    ids=["one_cycle", "sequential", "none"],
)
def test_unchanged_settings_are_left_alone(make_run, write_chats: Callable[..., str], scheduler, recwarn) -> None:
    train = write_chats(60)
    options = {**adamw(), "model_scheduler": scheduler}
    whole, whole_folder = run(make_run, train, 10, name="whole", **options)
    _, folder = run(make_run, train, 10, name="cut", crash=5, **options)
    rest, folder = run(
        make_run, train, 10, name="cut", ckpt=find_last_checkpoint(folder / "checkpoints"), **options
    )  # fmt: skip
    assert rest.losses == whole.losses[4:]
    assert rates(folder) == rates(whole_folder)
    assert not [w for w in recwarn if "now; the checkpoint had" in str(w.message)]


def test_every_changed_setting_is_named(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(40)
    _, folder = run(make_run, train, 2, name="run", data_reuse=1)
    changed = {
        "model_max_anchors": 8, "model_gamma": 3.0, "model_loss": {"ce": 0.5, "kl": 0.5},
        "model_noise": HiddenStateNoise(0.1), "model_scheduler": None, "data_target_dtype": "bfloat16",
        "trainer_gradient_clip_val": 0.5, "trainer_accumulate_grad_batches": 2, "trainer_precision": "bf16-mixed",
    }  # fmt: skip
    with pytest.warns(UserWarning, match="now; the checkpoint had") as caught:
        run(make_run, train, 4, name="run", ckpt=find_last_checkpoint(folder / "checkpoints"), **changed)
    named = {str(w.message).split(" is ")[0] for w in caught if "now; the checkpoint had" in str(w.message)}
    wanted = {key.replace("_", ".", 1) for key in changed} | {"trainer.max_steps"}
    assert wanted <= named
    # A scheduler's own arguments go with it.
    assert all(name.startswith("model.scheduler.") for name in named - wanted)


def test_another_optimizer_is_refused_at_resume(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(40)
    _, folder = run(make_run, train, 2, name="run", **adamw())
    for other in (lambda p: torch.optim.SGD(p, lr=0.1), MuonAdamW):
        with pytest.raises(ValueError, match=r"model\.optimizer is .*(SGD|MuonAdamW); .* state of torch\..*AdamW\."):
            run(
                make_run, train, 4, name="run", ckpt=find_last_checkpoint(folder / "checkpoints"),
                model_optimizer=other,
            )  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_every_precision_trains(make_run, write_chats: Callable[..., str], precision: str) -> None:
    record, _ = run(make_run, write_chats(20), 3, name="run", trainer_precision=precision)
    assert len(record.losses) == 3
    assert all(math.isfinite(loss) and loss > 0 for loss in record.losses)


def test_a_finished_run_trains_on_where_it_stopped(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(40)
    whole, _ = run(make_run, train, 9, name="whole")
    first, folder = run(make_run, train, 5, name="cut")
    rest, _ = run(make_run, train, 9, name="cut", ckpt=find_last_checkpoint(folder / "checkpoints"))
    assert first.rows + rest.rows == whole.rows


def test_e10_a_missing_drafter_weight_still_fails(make_run, write_chats: Callable[..., str]) -> None:
    train = write_chats(40)
    _, folder = run(make_run, train, 2, name="run")
    checkpoint = find_last_checkpoint(folder / "checkpoints")
    content = torch.load(checkpoint, weights_only=True)
    del content["state_dict"]["drafter.fc.weight"]
    torch.save(content, checkpoint)
    with pytest.raises(RuntimeError, match=r"drafter\.fc\.weight"):
        run(make_run, train, 4, name="run", ckpt=checkpoint)


def test_another_drafter_is_refused_at_resume(make_run, write_chats) -> None:
    train = write_chats(40)
    _, folder = run(make_run, train, 2, name="run")
    checkpoint = find_last_checkpoint(folder / "checkpoints")
    with pytest.raises(ValueError, match="block_size: 4 -> 3"):
        run(make_run, train, 4, name="run", ckpt=checkpoint, model_block_size=3)


def test_a_batch_without_an_anchor_is_a_step_with_zero_loss(make_run, write_chats, tmp_path: Path) -> None:
    import json

    # Two supervised tokens that never stand side by side: no position is eligible.
    rows = [{"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0]} for _ in range(4)]
    file = tmp_path / "ids.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in rows))
    record, folder = run(make_run, str(file), 2, name="run", trainer_max_epochs=2)
    assert record.losses == [0.0, 0.0]
    assert read_scalars(folder)["train/loss"] == [(1, 0.0), (2, 0.0)]
    state = torch.load(find_last_checkpoint(folder / "checkpoints"), weights_only=True)
    _, module, _ = make_run(str(file))
    assert all(torch.equal(p, state["state_dict"][f"drafter.{n}"]) for n, p in module.drafter.named_parameters())


def test_a_step_without_labels_leaves_momentum_alone(make_run, write_chats: Callable[..., str]) -> None:
    class EmptySecondBatch(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if batch_idx == 1:
                batch.label_mask.zero_()
                batch.slot_index.fill_(-1)
                batch.anchor_valid.zero_()
                batch.num_labels = 0
                self.before = {n: p.clone() for n, p in pl_module.drafter.named_parameters()}

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 1:
                assert all(torch.equal(p, self.before[n]) for n, p in pl_module.drafter.named_parameters())
                self.checked = True

    callback = EmptySecondBatch()
    trainer, module, data = make_run(write_chats(40), callbacks=[callback], trainer_max_steps=3)
    trainer.fit(module, datamodule=data)
    assert callback.checked


def test_validation_does_not_disturb_training(make_run, write_chats: Callable[..., str]) -> None:
    train, val = write_chats(40), write_chats(10, "val.jsonl", offset=700)
    plain, _ = run(make_run, train, 8, name="plain")
    options = {"data_val": val, "trainer_val_check_interval": 2, "trainer_check_val_every_n_epoch": None}
    validated, folder = run(make_run, train, 8, name="validated", data_target_devices=["cpu"], **options)
    assert plain.rows == validated.rows
    assert [round(v, 5) for v in plain.losses] == [round(v, 5) for v in validated.losses]
    losses = read_scalars(folder)["val/loss"]
    assert [s for s, _ in losses] == [2, 4, 6, 8]


def test_limit_train_batches_gives_each_epoch_its_own_rows(make_run, write_chats: Callable[..., str]) -> None:
    options = {"trainer_max_epochs": 2, "trainer_limit_train_batches": 3}
    record, _ = run(make_run, write_chats(60), -1, name="run", **options)
    assert len(record.rows) == 6
    assert record.rows[:3] != record.rows[3:]


def test_the_cursor_starts_at_the_beginning(make_run, write_chats: Callable[..., str]) -> None:
    _, _, data = make_run(write_chats(10))
    assert data.cursor == Cursor(0, 0, 0)
