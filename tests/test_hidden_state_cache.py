"""Runs with `data.cache_dir` train on the numbers of runs without it, and start no target for what is there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from dflash_lightning import fill_cache
from dflash_lightning.data import prepare_rows
from dflash_lightning.producer.produce import RowProducer
from dflash_lightning.producer.source import ProducerError
from dflash_lightning.target.resolve import load_tokenizer

from .producer.unloadable import KIND


class Losses(Callback):
    """Training loss of every batch; validation loss of every epoch."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.val: list[float] = []
        self.producers: list[int] = []  # batches that pool workers have forwarded, after each epoch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.train.append(float(outputs["loss"]))

    def on_validation_end(self, trainer, pl_module) -> None:
        self.val.append(float(trainer.callback_metrics["val/loss"]))

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        lanes = trainer.datamodule.source.lanes().values()
        spans = [stats.cumulative().get("target.model_forward") for stats in lanes]
        self.producers.append(sum(s.count for s in spans if s is not None))


def fit(make_run, train: str, *, run: str, unloadable: bool = False, epochs: int = 2, **options) -> Losses:
    losses = Losses()
    options = {"trainer_max_epochs": epochs, "trainer_max_steps": -1, **options}
    trainer, module, data = make_run(train, callbacks=[losses], run=run, **options)
    if unloadable:
        build = data._producer_config
        data._producer_config = lambda spec: replace(build(spec), kind=KIND)
    trainer.fit(module, datamodule=data)
    return losses


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Row numbers of every batch that the target in this process makes."""
    seen: list[list[int]] = []
    forward = RowProducer.forward

    def counted(self, stream, numbers):
        seen.append(list(numbers))
        return forward(self, stream, numbers)

    monkeypatch.setattr(RowProducer, "forward", counted)
    return seen


def test_inline_the_second_epoch_and_the_second_run_use_no_target(
    make_run, write_chats: Callable[..., str], tmp_path: Path, forwards: list[list[int]], capsys
) -> None:
    train, val, folder = write_chats(24), write_chats(8, "val.jsonl", offset=300), tmp_path / "cache"
    options = {"data_val": val, "data_cache_dir": str(folder)}
    plain = fit(make_run, train, run="plain", data_val=val)
    made = len(forwards)
    cached = fit(make_run, train, run="cached", **options)
    assert len(forwards) - made == made // 2 == len(entries(folder)), "each batch of train and val once"
    assert cached.train == plain.train, "bit for bit"
    assert cached.val == plain.val
    assert len(plain.val) == 2
    again = fit(make_run, train, run="again", unloadable=True, **options)
    assert (again.train, again.val) == (plain.train, plain.val)
    out = capsys.readouterr()
    said = out.out + out.err
    assert "dropped" not in said
    assert "made again" not in said


def test_workers_make_each_batch_once(make_run, write_chats: Callable[..., str], tmp_path: Path) -> None:
    train, folder = write_chats(24), tmp_path / "cache"
    plain = fit(make_run, train, run="plain")
    options = {"data_target_devices": ["cpu", "cpu"], "data_cache_dir": str(folder)}
    cached = fit(make_run, train, run="cached", **options)
    assert cached.train == plain.train, "bit for bit"
    assert cached.producers == [len(cached.train) // 2] * 2, "no target ran in the second epoch"
    again = fit(make_run, train, run="again", unloadable=True, **options)
    assert again.train == plain.train
    assert again.producers == [0, 0]


def test_a_target_that_cannot_be_loaded_for_a_missing_batch_ends_the_run_at_once(
    make_run, write_chats: Callable[..., str], tmp_path: Path
) -> None:
    train, folder = write_chats(16), tmp_path / "cache"
    options = {"data_target_devices": ["cpu"], "data_cache_dir": str(folder)}
    fit(make_run, train, run="fill", epochs=1, data_cache_dir=str(folder))
    entries(folder)[0].unlink()
    with pytest.raises(ProducerError, match=r"(?s)pid \d+\) failed:\n.*no target may be loaded"):
        fit(make_run, train, run="broken", unloadable=True, **options)


def test_read_only_uses_what_is_there_and_writes_nothing(
    make_run, write_chats: Callable[..., str], tmp_path: Path, forwards: list[list[int]], capfd
) -> None:
    train, folder = write_chats(24), tmp_path / "cache"
    plain = fit(make_run, train, run="plain", data_cache_dir=str(folder))
    entries(folder)[0].unlink()
    torn = entries(folder)[0]
    torn.write_bytes(torn.read_bytes()[:-1])
    before = {f: f.stat().st_mtime_ns for f in folder.rglob("*")}
    forwards.clear()
    losses = fit(make_run, train, run="read", data_cache_dir=str(folder), data_cache_mode="read-only")
    assert losses.train == plain.train
    assert len(forwards) == 4, "the two that are not usable, in each of two epochs"
    assert {f: f.stat().st_mtime_ns for f in folder.rglob("*")} == before
    assert str(torn) in capfd.readouterr().out


def test_other_target_layers_dtype_or_attention_share_nothing(
    make_run, write_chats: Callable[..., str], tmp_path: Path, forwards: list[list[int]]
) -> None:
    train, folder = write_chats(8), tmp_path / "cache"
    options = {"epochs": 1, "data_cache_dir": str(folder)}
    fit(make_run, train, run="first", **options)
    batches = len(forwards)
    others = (
        {"model_target_layer_ids": [1, 4]},
        {"model_loss": "kl"},
        {"data_target_dtype": "bfloat16"},
        {"data_attn_implementation": "eager"},
    )
    for number, other in enumerate(others, 1):
        fit(make_run, train, run=f"other{number}", **options, **other)
        assert len(forwards) == (number + 1) * batches, other
    assert len({f.parent.parent for f in entries(folder)}) == 1 + len(others)


def test_another_token_budget_puts_batches_together_from_rows(
    make_run, write_chats: Callable[..., str], tmp_path: Path
) -> None:
    train, folder = write_chats(24), tmp_path / "cache"
    fit(make_run, train, run="fill", epochs=1, data_cache_dir=str(folder))
    other = {"data_token_budget": 500, "data_seed": 3}
    plain = fit(make_run, train, run="plain", **other)
    losses = fit(make_run, train, run="rows", unloadable=True, data_cache_dir=str(folder), **other)
    assert losses.train == pytest.approx(plain.train, rel=1e-4)


def test_the_start_says_what_the_cache_needs_and_what_is_there(
    make_run, write_chats: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("dflash_lightning.datamodule.rank_zero_info", lambda text: said.append(text))
    train, folder = write_chats(24), tmp_path / "cache"
    fit(make_run, train, run="fill", epochs=1, data_cache_dir=str(folder))
    size = sum(f.stat().st_size for f in entries(folder))
    fit(make_run, train, run="again", epochs=1, data_cache_dir=str(folder), data_cache_limit_gb=size / 2e9)
    first, second = (text for text in said if "cache_dir" in text)
    count = len(entries(folder))
    assert f"0 of {count} batches are there" in first
    assert f"{count} of {count} batches are there" in second
    assert f"limit {size / 2e9:.3f} GB" in second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_cache_mode": "read-only"}, r"data\.cache_mode=read-only needs data\.cache_dir"),
        ({"data_cache_limit_gb": 1.0}, r"data\.cache_limit_gb=1\.0 needs data\.cache_dir"),
        ({"data_cache_dir": "x", "data_cache_limit_gb": 0}, r"data\.cache_limit_gb=0: more than 0"),
        ({"data_cache_dir": "x", "data_cache_mode": "off"}, r"data\.cache_mode='off': 'write-through' or 'read-only'"),
    ],
)
def test_options_that_make_no_sense_are_named(make_run, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_run("train.jsonl", **options)


def test_read_only_needs_a_folder(make_run, write_chats: Callable[..., str], tmp_path: Path) -> None:
    options = {"data_cache_dir": str(tmp_path / "none"), "data_cache_mode": "read-only"}
    with pytest.raises(FileNotFoundError, match=r"data\.cache_dir=.*none: no such folder"):
        fit(make_run, write_chats(8), run="run", **options)


def fill(target: str, rows: Path, folder: Path, *arguments: str) -> None:
    parser = argparse.ArgumentParser()
    fill_cache.add_arguments(parser)
    options = ["--hidden-states", "--cache-dir", str(folder), "--num-layers", "2", "--token-budget", "256"]
    args = parser.parse_args([*options, "--num-buckets", "2", *arguments])
    vars(args).update(target=target, trust_remote_code=False, max_seq_len=128, min_supervised_tokens=2)
    fill_cache.run(args, str(rows))


def test_prepare_fills_the_cache_for_fit_and_goes_on_where_it_stopped(
    make_run, write_chats: Callable[..., str], tiny_target: str, tmp_path: Path, capfd
) -> None:
    rows, folder = tmp_path / "rows", tmp_path / "cache"
    prepare_rows([write_chats(24)], load_tokenizer(tiny_target), rows, max_seq_len=128)
    plain = fit(make_run, str(rows), run="plain")
    fill(tiny_target, rows, folder)
    losses = fit(make_run, str(rows), run="cached", unloadable=True, data_cache_dir=str(folder))
    assert losses.train == plain.train, "bit for bit"

    count, kept = len(entries(folder)), entries(folder)[1:]
    before = {f: f.stat().st_mtime_ns for f in kept}
    entries(folder)[0].unlink()
    size = sum(f.stat().st_size for f in kept)
    with pytest.raises(ValueError, match="not all of it could be stored"):
        fill(tiny_target, rows, folder, "--cache-limit-gb", str(size / 1e9))
    fill(tiny_target, rows, folder)
    assert len(entries(folder)) == count
    assert {f: f.stat().st_mtime_ns for f in kept} == before, "what was there is not made again"
    capfd.readouterr()
    fill(tiny_target, rows, folder)
    assert f"all {count} batches are there" in capfd.readouterr().out


def test_prepare_fills_both_sides_of_a_split(
    make_run, write_chats: Callable[..., str], tiny_target: str, tmp_path: Path
) -> None:
    rows, folder = tmp_path / "rows", tmp_path / "cache"
    prepare_rows([write_chats(24)], load_tokenizer(tiny_target), rows, max_seq_len=128)
    plain = fit(make_run, str(rows), run="plain", data_val_fraction=0.3)
    fill(tiny_target, rows, folder, "--val-fraction", "0.3")
    made = len(entries(folder))
    options = {"data_val_fraction": 0.3, "data_cache_dir": str(folder)}
    losses = fit(make_run, str(rows), run="cached", unloadable=True, **options)
    assert plain.val
    assert (losses.train, losses.val) == (plain.train, plain.val), "bit for bit"
    assert len(entries(folder)) == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--val-fraction", "1.5"], "--val-fraction=1.5"),
        (["--cache-dir", ""], "--hidden-states needs --cache-dir"),
        (["--token-budget", "100"], "--token-budget=100 is smaller than --max-seq-len=128"),
        (["--target-devices", "gpu"], "--target-devices: 'gpu' is neither"),
        (["--target-dtype", "half8"], "--target-dtype='half8'"),
        (["--target-layer-ids", "1", "8"], r"target_layer_ids=\[1, 8\]"),
    ],
)
def test_prepare_names_the_option_that_makes_no_sense(
    tiny_target: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fill(tiny_target, tmp_path, tmp_path / "cache", *arguments)
