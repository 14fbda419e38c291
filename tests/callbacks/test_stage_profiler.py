"""StageProfilerCallback in whole small runs: nothing is lost, whatever ends the run; the event file is read back."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.callbacks import DrafterCheckpoint, StageProfilerCallback
from dflash_lightning.callbacks.panels import LAYOUT
from dflash_lightning.callbacks.stage_profiler import TRACE_FILE
from dflash_lightning.pipeline.windows import PROFILE_FILE, read_windows
from dflash_lightning.profiling import STAGES, ProfileStats, process_stats

# What an inline run on a CPU has; the others need a device, an own process or flex attention.
INLINE_STAGES = {
    "target.load_batch",
    "target.model_forward",
    "target.pack_hidden",
    "drafter.queue_wait",
    "drafter.forward",
    "drafter.backward",
    "drafter.optimizer_step",
    "drafter.grad_norm_sync",
    "drafter.metrics_sync",
    "dflash.block_layout",
    "dflash.create_block_mask_full",
    "dflash.layers",
    "dflash.loss",
}


class Raise(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == self.batch:
            raise RuntimeError("raised on purpose")


def events_of(folder: str | Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    return events


def test_an_interval_shorter_than_a_step_gives_a_window_each_step(make_run, write_chats: Callable[..., str]) -> None:
    callback = StageProfilerCallback(0.001, chrome_trace=True)
    callbacks = [callback, DrafterCheckpoint(every_n_train_steps=2)]
    options = {"data_val": write_chats(8, "val.jsonl"), "trainer_val_check_interval": 3}
    trainer, module, data = make_run(
        write_chats(60), callbacks=callbacks, trainer_check_val_every_n_epoch=None, **options
    )
    trainer.fit(module, datamodule=data)
    windows = read_windows(trainer.default_root_dir)
    assert windows[-1].closed_by == "end", "it holds the last checkpoint and no step"
    assert [w.step for w in windows if w.batches] == [1, 2, 3, 4, 5, 6], "one point a window, on one axis"
    assert [w.batches for w in windows[:6]] == [1] * 6
    assert any("drafter.checkpoint" in w.lanes["rank0"] for w in windows)
    assert sum(w.lanes["rank0"]["drafter.forward"].count for w in windows[:6]) == 6
    assert sum(
        w.lanes["rank0"]["drafter.validation"].count for w in windows if "drafter.validation" in w.lanes["rank0"]
    )
    assert windows[0].warm_up

    events = events_of(trainer.default_root_dir)
    for stage in INLINE_STAGES - {"target.load_batch"}:
        assert any(stage in w.lanes["rank0"] for w in windows), stage
        steps = [e.step for e in events.Scalars(f"profile/avg_ms/{stage}")]
        assert steps == sorted(set(steps)), stage
        for kind in ("max_ms", "total_s", "share", "count"):
            assert [e.step for e in events.Scalars(f"profile/{kind}/{stage}")] == steps
    tags = events.Tags()
    assert "profile/timeline" in tags["images"]
    assert {"profile/table/text_summary", "profile/verdict/text_summary"} <= set(tags["tensors"])
    assert len(events.Tensors("custom_scalars__config__")) == 1
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    for category, charts in LAYOUT.items():
        assert category.encode() in layout
        assert all(name.encode() in layout for name in charts)
    assert "bound" in events.Tensors("profile/verdict/text_summary")[-1].tensor_proto.string_val[0].decode()
    trace = json.loads((Path(trainer.default_root_dir) / TRACE_FILE).read_text())["traceEvents"]
    assert {"drafter.forward", "target.model_forward"} <= {e["name"] for e in trace}
    assert "save_checkpoint" not in vars(trainer), "what it wrapped is as before"


def test_a_synthetic_run_shows_every_stage_there_is(make_run, write_chats) -> None:
    class AllStages(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            for index, stage in enumerate(STAGES, start=1):
                process_stats().add(stage, index * 1e-5)

    trainer, module, data = make_run(write_chats(60), callbacks=[AllStages(), StageProfilerCallback(600)])
    trainer.fit(module, datamodule=data)
    events = events_of(trainer.default_root_dir)
    for stage in STAGES:
        for kind in ("avg_ms", "max_ms", "total_s", "share", "count"):
            assert len(events.Scalars(f"profile/{kind}/{stage}")) == 1
        assert events.Scalars(f"profile/count/{stage}")[0].value >= 6
    table = events.Tensors("profile/table/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert all(table.count(stage) >= 2 for stage in STAGES), "in the window's table and in that since the start"


def test_a_training_shorter_than_the_interval_gives_one_window_at_its_end(make_run, write_chats) -> None:
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(600)])
    trainer.fit(module, datamodule=data)
    (window,) = read_windows(trainer.default_root_dir)
    assert (window.step, window.batches, window.closed_by) == (6, 6, "end")
    assert set(window.lanes["rank0"]) >= INLINE_STAGES
    assert window.tokens > 0
    assert window.coverage() <= 1.0
    assert window.group_steps == 6


def test_what_comes_before_the_clock_starts_is_in_no_window(make_run, write_chats, monkeypatch) -> None:
    monkeypatch.setattr("dflash_lightning.callbacks.stage_profiler.write_layout", lambda writer: time.sleep(0.3))
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(600)])
    trainer.fit(module, datamodule=data)
    (window,) = read_windows(trainer.default_root_dir)
    assert window.coverage() <= 1.0


def test_spans_cover_the_main_thread(make_run, write_chats) -> None:
    trainer, module, data = make_run(
        write_chats(60), callbacks=[StageProfilerCallback(600)], trainer_max_steps=20, trainer_max_epochs=-1
    )
    trainer.fit(module, datamodule=data)
    (window,) = read_windows(trainer.default_root_dir)
    other = window.lanes["rank0"]["drafter.other"].total
    assert window.coverage() * window.wall + other == pytest.approx(window.wall)
    # Steps of a few milliseconds: what Lightning does around them weighs most here.
    assert window.coverage() >= 0.98


def test_a_callback_that_raises_leaves_one_last_window(make_run, write_chats) -> None:
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(600), Raise(3)])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, datamodule=data)
    (window,) = read_windows(trainer.default_root_dir)
    assert window.closed_by == "exception"
    assert window.lanes["rank0"]["drafter.forward"].count == 4
    steps = [e.step for e in events_of(trainer.default_root_dir).Scalars("profile/count/drafter.forward")]
    assert steps == [window.step]


def test_an_exception_after_the_end_writes_no_second_window(make_run, write_chats) -> None:
    class RaiseAtEnd(Callback):
        def on_train_end(self, trainer, pl_module) -> None:
            raise RuntimeError("raised on purpose")

    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(600), RaiseAtEnd()])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, datamodule=data)
    assert [w.closed_by for w in read_windows(trainer.default_root_dir)] == ["end"]


def test_accumulated_batches_give_no_two_points_at_one_step(make_run, write_chats) -> None:
    options = {"trainer_accumulate_grad_batches": 3, "trainer_max_steps": 3, "trainer_max_epochs": -1}
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(0.001)], **options)
    trainer.fit(module, datamodule=data)
    windows = read_windows(trainer.default_root_dir)
    assert [(w.step, w.batches) for w in windows if w.batches] == [(1, 3), (2, 3), (3, 3)]


def test_zero_turns_it_off(make_run, write_chats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "0")
    trainer, module, data = make_run(write_chats(20), callbacks=[StageProfilerCallback()], trainer_max_steps=1)
    trainer.fit(module, datamodule=data)
    assert not (Path(trainer.default_root_dir) / PROFILE_FILE).exists()


def test_the_interval_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_PROFILE_INTERVAL", raising=False)
    assert StageProfilerCallback().profile_interval == 60
    for interval in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"profile_interval={interval}"):
            StageProfilerCallback(interval)
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "")
    assert StageProfilerCallback().profile_interval == 60
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "soon")
    for wrong in ("soon", "nan", "-3"):
        monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", wrong)
        with pytest.raises(ValueError, match=f"DFLASH_PROFILE_INTERVAL={wrong}: give seconds"):
            StageProfilerCallback()


def test_a_second_profiler_is_refused(make_run, write_chats) -> None:
    trainer, module, data = make_run(
        write_chats(20), callbacks=[StageProfilerCallback(), StageProfilerCallback(5)], trainer_max_steps=1
    )
    with pytest.raises(ValueError, match="a second StageProfilerCallback"):
        trainer.fit(module, datamodule=data)


def test_every_logger_gets_every_scalar(make_run, write_chats, tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(str(tmp_path / name), name="", version="") for name in ("a", "b")]
    loggers.append(CSVLogger(str(tmp_path / "c"), name="", version=""))
    trainer, module, data = make_run(
        write_chats(20), callbacks=[StageProfilerCallback(600)], trainer_max_steps=2, trainer_logger=loggers
    )
    trainer.fit(module, datamodule=data)
    for name in ("a", "b"):
        events = events_of(tmp_path / name)
        assert len(events.Scalars("train/loss")) == 2
        assert len(events.Scalars("profile/avg_ms/drafter.forward")) == 1
        assert "profile/verdict/text_summary" in events.Tags()["tensors"]
    header = (tmp_path / "c" / "metrics.csv").read_text().splitlines()[0]
    assert "train/loss" in header
    assert "profile/avg_ms/drafter.forward" in header


def test_a_profile_that_cannot_be_written_does_not_end_training(make_run, write_chats, monkeypatch) -> None:
    def full(*_args) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("dflash_lightning.callbacks.stage_profiler.append_window", full)
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(0.001)])
    with pytest.warns(UserWarning, match=r"profile\.jsonl misses windows from now on: no space") as caught:
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 6
    assert sum("profile.jsonl" in str(w.message) for w in caught) == 1, "said once"
    assert len(events_of(trainer.default_root_dir).Scalars("profile/avg_ms/drafter.forward")) == 6


def test_a_profile_that_cannot_be_drawn_hides_no_exception(make_run, write_chats, monkeypatch) -> None:
    def broken(*_args) -> None:
        raise ZeroDivisionError("a fault of the picture")

    monkeypatch.setattr("dflash_lightning.callbacks.stage_profiler.draw_timeline", broken)
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(600), Raise(3)])
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        pytest.warns(UserWarning, match="last profile window could not be written"),
    ):
        trainer.fit(module, datamodule=data)


def test_an_exception_inside_an_accumulation_gives_no_second_point(make_run, write_chats) -> None:
    options = {"trainer_accumulate_grad_batches": 2, "trainer_max_steps": 9, "trainer_max_epochs": -1}
    trainer, module, data = make_run(write_chats(60), callbacks=[StageProfilerCallback(0.001), Raise(4)], **options)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, datamodule=data)
    assert [w.step for w in read_windows(trainer.default_root_dir) if w.batches] == [1, 2, 2]
    points = events_of(trainer.default_root_dir).Scalars("profile/count/drafter.forward")
    assert [e.step for e in points] == [1, 2]


def test_validation_is_no_part_of_the_training_step(make_run, write_chats) -> None:
    """Its own forward passes and layouts must not count as the step's; its time is a stage, without a gap before it."""
    options = {"data_val": write_chats(30, "val.jsonl"), "trainer_val_check_interval": 2, "trainer_max_steps": 8}
    trainer, module, data = make_run(
        write_chats(60), callbacks=[StageProfilerCallback(600)], trainer_check_val_every_n_epoch=None,
        trainer_num_sanity_val_steps=2, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    (window,) = read_windows(trainer.default_root_dir)
    lane = window.lanes["rank0"]
    assert lane["drafter.validation"].count == 4
    for stage in ("drafter.forward", "dflash.layers", "dflash.loss", "dflash.create_block_mask_full"):
        assert lane[stage].count == 8, stage
    assert 8 <= lane["dflash.block_layout"].count <= 8 + 3, "those that lie ready, at most"
    assert 0.98 <= window.coverage() <= 1.0


def test_thousands_of_spans_in_a_step_are_all_counted(make_run, write_chats) -> None:
    class Chatty(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
            for _ in range(3000):
                process_stats().add("user.stage", 1e-6)

    trainer, module, data = make_run(
        write_chats(60), callbacks=[Chatty(), StageProfilerCallback(600)], trainer_max_steps=8
    )
    trainer.fit(module, datamodule=data)
    (window,) = read_windows(trainer.default_root_dir)
    assert window.lanes["rank0"]["user.stage"].count >= 8 * 3000
    assert window.coverage() <= 1.0
    assert window.group_wait == pytest.approx(window.lanes["rank0"]["drafter.queue_wait"].total, rel=0.01)


def test_the_trainers_own_profiler_receives_the_main_threads_spans(make_run, write_chats) -> None:
    profiler = SimpleProfiler()
    options = {"data_val": write_chats(8, "val.jsonl"), "trainer_val_check_interval": 3}
    trainer, module, data = make_run(
        write_chats(60), callbacks=[StageProfilerCallback(600), DrafterCheckpoint(every_n_train_steps=2)],
        trainer_check_val_every_n_epoch=None, trainer_profiler=profiler, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    main = INLINE_STAGES - {"target.load_batch", "target.model_forward", "target.pack_hidden", "dflash.block_layout"}
    received = {name.removeprefix("[dflash]") for name in profiler.recorded_durations if name.startswith("[dflash]")}
    assert received == main | {"drafter.checkpoint", "drafter.validation"}
    (window,) = [w for w in read_windows(trainer.default_root_dir) if w.batches]
    for stage in main:
        ours = window.lanes["rank0"][stage]
        assert len(profiler.recorded_durations[f"[dflash]{stage}"]) == ours.count, stage


def test_what_wrapped_a_checkpoint_before_is_there_again(make_run, write_chats) -> None:
    trainer, module, data = make_run(write_chats(20), callbacks=[StageProfilerCallback(600)], trainer_max_steps=1)
    mine = trainer.save_checkpoint = lambda *args, **kwargs: None
    trainer.fit(module, datamodule=data)
    assert trainer.save_checkpoint is mine


class FakePool:
    """A source whose producer and second rank are written by the test."""

    def __init__(self) -> None:
        self.producer, self.rank1 = ProfileStats(), SimpleNamespace(stats=ProfileStats(), finished=True, steps=[])
        self.rank1.take_steps = self._take

    def _take(self) -> list[list[float]]:
        steps, self.rank1.steps = self.rank1.steps, []
        return steps

    def lanes(self) -> dict[str, ProfileStats]:
        return {"producer0": self.producer}

    def rank_profiles(self) -> dict:
        return {1: self.rank1}


def fake_trainer(folder: Path, source: FakePool, printed: list[str]) -> SimpleNamespace:
    data = SimpleNamespace(source=source, queue_state=lambda: (9, 60), target_devices=[0], queue_depth=60)
    return SimpleNamespace(
        datamodule=data, global_rank=0, global_step=0, is_global_zero=True, loggers=[], world_size=2, num_nodes=1,
        default_root_dir=str(folder), print=printed.append, save_checkpoint=lambda: None,
    )  # fmt: skip


def fake_steps(callback: StageProfilerCallback, trainer: SimpleNamespace, source: FakePool, steps: int) -> None:
    stats, module = process_stats(), SimpleNamespace(last_logged={"train/loss": 2.31, "train/acceptance_length": 3.4})
    for batch in range(trainer.global_step, trainer.global_step + steps):
        for stage, seconds in (("drafter.queue_wait", 0.1), ("drafter.forward", 0.2), ("drafter.backward", 0.5)):
            stats.add(stage, seconds)
        source.rank1.stats.add("drafter.only_here", 0.3)
        source.rank1.steps.append([batch, 0.4, 0.2])
        source.producer.add("target.model_forward", 0.7)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, SimpleNamespace(num_tokens=100), batch)


def test_two_ranks_of_which_one_has_a_stage(tmp_path: Path) -> None:
    source, printed = FakePool(), []
    trainer = fake_trainer(tmp_path, source, printed)
    callback = StageProfilerCallback(600)
    callback.on_train_start(trainer, None)
    fake_steps(callback, trainer, source, 5)
    callback.on_train_end(trainer, SimpleNamespace(last_logged={"train/loss": 2.31}))
    (window,) = read_windows(tmp_path)
    assert window.lanes["rank1"]["drafter.only_here"].count == 5
    assert "drafter.only_here" not in window.lanes["rank0"]
    assert window.group_steps == 5
    assert window.group_wait == pytest.approx(5 * 0.4), "the maximum over ranks"
    assert window.group_backward == pytest.approx(5 * 0.2), "the minimum over ranks"
    assert (window.tokens, window.batches) == (1000, 10)
    assert printed[0].startswith("[0s] step 5 | ")
    assert " | loss 2.31 | q_hs 9/60 | wait 100%" in printed[0]


def test_memory_is_flat_over_many_steps(tmp_path: Path) -> None:
    source = FakePool()
    trainer = fake_trainer(tmp_path, source, printed := [])
    callback = StageProfilerCallback(0.2)
    callback.on_train_start(trainer, None)
    tracemalloc.start()
    fake_steps(callback, trainer, source, 2000)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(9):
        fake_steps(callback, trainer, source, 2000)
        printed.clear()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    callback.on_train_end(trainer, SimpleNamespace())
    assert grown < 1_000_000, "thirty windows are kept, and spans and steps only until the next window"
    windows = read_windows(tmp_path)
    assert sum(w.batches for w in windows) == 40_000
    assert sum(w.group_steps for w in windows) == 20_000
