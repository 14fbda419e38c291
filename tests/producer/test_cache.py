"""The hidden-state cache on disk: what it gives back, what it refuses, and what writers leave behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dflash_lightning.data import ensure_rows
from dflash_lightning.producer.cache import CacheConfig, StateCache
from dflash_lightning.producer.cache_file import StateLayout, batch_key
from dflash_lightning.producer.cached import CachedProducer, StateLookup, state_layout, with_cache
from dflash_lightning.producer.produce import ProducerConfig, TargetLoadError, make_producer, producer_config
from dflash_lightning.producer.rows import RowReader
from dflash_lightning.producer.slots import SlotMemory, SlotViews
from dflash_lightning.target.resolve import load_tokenizer

from .unloadable import KIND

BATCHES = [[0, 1, 2], [3, 4], [5]]


@pytest.fixture
def plain(tiny_target: str, write_chats: Callable[..., str], tmp_path: Path) -> ProducerConfig:
    rows = ensure_rows([write_chats(12)], load_tokenizer(tiny_target), tmp_path / "rows", max_seq_len=128)
    options = {"last_hidden_state": True, "rows": {"train": str(rows)}, "token_budget": 512, "max_seq_len": 50}
    return producer_config(tiny_target, (1, 5), **options)


@pytest.fixture
def config(plain: ProducerConfig, tmp_path: Path) -> ProducerConfig:
    return cached(plain, tmp_path)


def cached(plain: ProducerConfig, tmp_path: Path, *, mode: str = "write-through", limit_gb=None) -> ProducerConfig:
    return with_cache(plain, str(tmp_path / "cache"), mode=mode, limit_gb=limit_gb, writers=1)


def produce(config: ProducerConfig, batches=BATCHES) -> list[tuple[list[int], SlotViews]]:
    """Lengths and tensors of each batch, made or found by a producer opened for it."""
    producer = make_producer(config, "cpu")
    made = []
    for rows in batches:
        out = SlotMemory(config.shape, 1).views(0)
        lengths = producer.pack(producer.forward("train", rows), out)
        made.append((lengths, out.head(sum(lengths))))
    return made


def assert_equal(got, expected) -> None:
    for (lengths, views), (expected_lengths, expected_views) in zip(got, expected, strict=True):
        assert lengths == expected_lengths
        for name, tensor in vars(expected_views).items():
            assert torch.equal(getattr(views, name), tensor), name


def files(config: ProducerConfig) -> list[Path]:
    assert config.cache is not None
    return sorted(Path(config.cache.folder).rglob("*.safetensors"))


def file_of(config: ProducerConfig, rows: list[int]) -> Path:
    producer = make_producer(replace(config, kind=KIND), "cpu")
    assert isinstance(producer, CachedProducer)
    key = batch_key(producer.rows.load("train", rows).hashes())
    return next(f for f in files(config) if f.stem == key)


def test_what_is_stored_comes_back_without_a_target(config: ProducerConfig, plain: ProducerConfig) -> None:
    expected = produce(plain)
    assert_equal(produce(config), expected)
    assert len(files(config)) == len(BATCHES)
    assert_equal(produce(replace(config, kind=KIND)), expected)


def test_an_entry_is_a_safetensors_file(config: ProducerConfig, plain: ProducerConfig) -> None:
    (lengths, views), *_ = produce(config)
    with safe_open(file_of(config, BATCHES[0]), framework="pt") as file:
        assert torch.equal(file.get_tensor("hidden_states"), views.hidden_states)
        assert torch.equal(file.get_tensor("last_hidden_state"), views.last_hidden_state)
        meta = file.metadata()
    assert [tokens for _, tokens, _ in json.loads(meta["rows"])] == lengths
    identity = json.loads(meta["identity"])
    assert identity["layer_ids"] == [1, 5]
    assert identity["dtype"] == "float32"
    assert plain.target not in str(meta), "the place of the target does not matter"


def flip(offset: int) -> Callable[[Path, Path], None]:
    def damage(path: Path, _other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def cut(count: int) -> Callable[[Path, Path], None]:
    return lambda path, _other: path.write_bytes(path.read_bytes()[:count])


DAMAGE = {
    "torn": (cut(-1), "cut off"),
    "empty": (cut(0), "header is unreadable"),
    "only a header": (cut(200), "header is unreadable"),
    "longer": (lambda path, _other: path.write_bytes(path.read_bytes() + b"x"), "cut off or longer"),
    "a flipped bit in the last state": (flip(-1), "checksum"),
    "a flipped bit in the header's length": (flip(5), "header is unreadable"),
    "a flipped bit in the header": (flip(9), "header is unreadable"),
    "swapped": (lambda path, other: shutil.copy(other, path), "not those that its name stands for"),
    "a folder": (lambda path, _other: (path.unlink(), path.mkdir()), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_named_and_made_again(config, plain, damage: str, capfd) -> None:
    expected = produce(config)
    path, other = file_of(config, BATCHES[0]), file_of(config, BATCHES[1])
    make, reason = DAMAGE[damage]
    make(path, other)
    assert_equal(produce(config), expected)
    out = capfd.readouterr().out
    assert out.count(f"hidden-state cache: {path} is made again") == 1
    assert reason in out
    if damage != "a folder":  # somebody else's; it stays where it is
        assert_equal(produce(replace(config, kind=KIND)), expected)


def test_a_damaged_entry_is_not_put_into_batches_of_other_rows(config: ProducerConfig, plain: ProducerConfig) -> None:
    produce(config)
    flip(-1)(file_of(config, BATCHES[0]), Path())
    mixed = [[5, 2], [4, 3]]
    assert_equal(produce(config, mixed)[:1], produce(plain, mixed)[:1])


@pytest.mark.parametrize("change", [{"layer_ids": (1, 4)}, {"compile": True}, {"attn_implementation": "eager"}])
def test_an_entry_made_with_other_settings_is_foreign(config, plain, tmp_path: Path, change: dict, capfd) -> None:
    other = cached(replace(plain, **change), tmp_path)
    assert other.cache is not None
    assert config.cache is not None
    expected = produce(config)
    assert not other.cache.home.exists(), "its entries lie elsewhere"
    shutil.copytree(config.cache.home, other.cache.home)
    StateLookup(other).holds("train", BATCHES[0])
    assert f"made with another {next(iter(change))}" in capfd.readouterr().out
    assert_equal(produce(config), expected)


def test_another_target_is_foreign(plain: ProducerConfig, config: ProducerConfig, tmp_path: Path) -> None:
    produce(config)
    moved = tmp_path / "moved"
    shutil.copytree(plain.target, moved)
    assert_equal(produce(replace(cached(replace(plain, target=str(moved)), tmp_path), kind=KIND)), produce(plain))
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-100] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    assert StateLookup(cached(replace(plain, target=str(moved)), tmp_path)).is_empty()


def test_rows_of_other_batches_are_put_together(config: ProducerConfig, plain: ProducerConfig) -> None:
    produce(config)
    other = [[4, 0, 5], [2, 1]]
    for (lengths, views), (want, fresh) in zip(
        produce(replace(config, kind=KIND), other), produce(plain, other), strict=True
    ):
        assert lengths == want
        assert torch.equal(views.input_ids, fresh.input_ids)
        assert torch.equal(views.loss_mask, fresh.loss_mask)
        torch.testing.assert_close(views.hidden_states, fresh.hidden_states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(views.last_hidden_state, fresh.last_hidden_state, rtol=1e-4, atol=1e-5)
    with pytest.raises(TargetLoadError, match="no target may be loaded"):
        produce(replace(config, kind=KIND), [[0, 11]])


def test_a_batch_is_not_put_together_from_what_the_same_process_has_just_made(config: ProducerConfig) -> None:
    produce(config, [[0, 1], [2], [0], [1, 2]])
    assert len(files(config)) == 4, "else the order of the batches would decide over the last bits"


def test_a_dropped_row_is_dropped_again(config: ProducerConfig, capfd) -> None:
    producer = make_producer(config, "cpu")
    assert isinstance(producer, CachedProducer)
    inner = producer._producer
    forward = inner.target.forward  # pyright: ignore

    def broken(ids):
        taps = forward(ids)
        taps[0] = taps[0].clone()
        taps[0][1, 2] = float("inf")
        return taps

    inner.target.forward = broken  # pyright: ignore
    memory = SlotMemory(config.shape, 1)
    lengths = producer.pack(producer.forward("train", [3, 4, 5]), memory.views(0))
    assert lengths[1] == 0
    made = [(lengths, memory.views(0).head(sum(lengths)))]
    capfd.readouterr()
    assert_equal(produce(replace(config, kind=KIND), [[3, 4, 5]]), made)
    assert "dropped row 4 of train" in capfd.readouterr().out


def test_an_empty_cache_shows_a_broken_target_at_once_and_a_filled_one_does_not_touch_it(config) -> None:
    broken = replace(config, kind=KIND)
    with pytest.raises(RuntimeError, match="no target may be loaded"):
        make_producer(broken, "cpu")
    produce(config)
    loaded: list[bool] = []
    make_producer(broken, "cpu", lambda: loaded.append(True))
    assert not loaded


def test_read_only_writes_nothing(plain: ProducerConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    config = cached(plain, tmp_path, mode="read-only")
    assert_equal(produce(config), produce(plain))
    assert not list((tmp_path / "cache").iterdir())


def test_storing_stops_at_the_limit_and_says_so_once(plain: ProducerConfig, tmp_path: Path, capfd) -> None:
    batches = [[n] for n in range(12)]
    expected = produce(plain, batches)
    one = expected[0][0][0] * state_layout(plain).token_bytes
    config = cached(plain, tmp_path, limit_gb=4 * one / 1e9)
    assert_equal(produce(config, batches), expected)
    out = capfd.readouterr().out
    assert out.count("data.cache_limit_gb=") == 1
    assert "training goes on" in out
    used = sum(f.stat().st_size for f in files(config))
    assert len(files(config)) >= 2
    assert used < 4.5 * one
    assert_equal(produce(config, batches), expected)
    assert sum(f.stat().st_size for f in files(config)) == used


def test_writers_share_what_is_left_of_the_limit(config: ProducerConfig) -> None:
    (_, views), *_ = produce(config, [[0]])
    assert config.cache is not None
    tensors = {"hidden_states": views.hidden_states, "last_hidden_state": views.last_hidden_state}
    size = files(config)[0].stat().st_size
    limited = replace(config.cache, limit_bytes=20 * size, writers=4)
    caches = [StateCache(limited, state_layout(config)) for _ in range(4)]
    for turn in range(40):
        for number, cache in enumerate(caches):
            cache.store([f"{turn * 4 + number:032x}"], [views.hidden_states.shape[0]], tensors)
    total = sum(f.stat().st_size for f in files(config))
    assert 0.7 * 20 * size < total <= 20.5 * size


def test_a_full_disk_stops_storing_and_leaves_nothing_half(config, plain, monkeypatch, capfd) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_equal(produce(config), produce(plain))
    out = capfd.readouterr().out
    assert out.count("the disk is full") == 1
    assert "GB free" in out
    assert config.cache is not None
    assert not [f for f in Path(config.cache.folder).rglob("*") if f.is_file()]


WRITER = """
import os, signal, sys, torch
from dflash_lightning.producer.cache import CacheConfig, StateCache
from dflash_lightning.producer.cache_file import StateLayout
how = sys.argv[2]
if how == "killed":
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
if how == "stopped":
    os.fsync = lambda fd: (print("stopped", flush=True), sys.stdin.read())
cache = StateCache(CacheConfig(sys.argv[1], {"target": "t"}), StateLayout(8, 0, "float32"))
for turn in range(5 if how == "races" else 1):
    for n in range(8):
        cache.store([f"{n:032x}"], [50], {"hidden_states": torch.full((50, 8), float(n))})
assert cache.storing
"""


def writer(folder: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(folder), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def opened(folder: Path) -> StateCache:
    return StateCache(CacheConfig(str(folder), {"target": "t"}), StateLayout(8, 0, "float32"))


def test_a_killed_writer_leaves_nothing_that_is_read_and_its_rest_is_cleaned(tmp_path: Path) -> None:
    killed = writer(tmp_path, "killed")
    assert killed.wait(60) == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    assert opened(tmp_path).find([f"{0:032x}"]) is None
    assert not list(tmp_path.rglob("*.tmp")), "opening for writing cleans up"


def test_the_file_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    living = writer(tmp_path, "stopped")
    assert living.stdout is not None
    assert living.stdout.readline() == "stopped\n"
    cache = opened(tmp_path)
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    living.communicate("")
    assert living.returncode == 0
    assert cache.find([f"{7:032x}"]) is not None


def test_two_processes_may_write_the_same_entries(tmp_path: Path) -> None:
    writers = [writer(tmp_path, "races") for _ in range(2)]
    cache, seen = opened(tmp_path), 0
    while any(w.poll() is None for w in writers) or not seen:
        for n in range(8):
            rows = cache.find([f"{n:032x}"])
            if rows is not None:
                states = torch.empty(50, 8)
                cache.read(rows, {"hidden_states": states})
                assert (states == n).all()
                seen += 1
        time.sleep(0.001)
    assert [w.returncode for w in writers] == [0, 0]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 8
    assert not list(tmp_path.rglob("*.tmp"))


def test_rows_whose_short_names_are_equal_are_told_apart(tmp_path: Path) -> None:
    one, other = "a" * 16 + "0" * 16, "a" * 16 + "1" * 16
    opened(tmp_path).store([one, "b" * 32], [2, 1], {"hidden_states": torch.ones(3, 8)})
    assert opened(tmp_path).find([other]) is None
    assert opened(tmp_path).find([one]) is not None


def test_rows_are_read_as_they_are_stored_and_cut(config: ProducerConfig) -> None:
    from dflash_lightning.data import load_rows

    stored = load_rows(config.rows["train"])
    rows = RowReader(config.rows, config.max_seq_len).load("train", [7, 2, 2])
    assert max(len(stored[n]["input_ids"]) for n in (7, 2)) > config.max_seq_len
    assert [ids.tolist() for ids in rows.ids] == [stored[n]["input_ids"][: config.max_seq_len] for n in (7, 2, 2)]
    assert [mask.tolist() for mask in rows.masks] == [stored[n]["loss_mask"][: config.max_seq_len] for n in (7, 2, 2)]
