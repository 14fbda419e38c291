"""Producers in processes of their own and inside the training process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_lightning.data import ensure_rows
from dflash_lightning.producer.pool import ProducerPool, worker_environment
from dflash_lightning.producer.produce import ProducerConfig
from dflash_lightning.producer.slots import SlotMemory, SlotShape
from dflash_lightning.producer.source import InlineSource, ProducerError
from dflash_lightning.target.resolve import load_tokenizer

ENTRIES = [(n, [2 * n, 2 * n + 1]) for n in range(6)]


@pytest.fixture
def config(tiny_target: str, write_chats: Callable[..., str], tmp_path: Path) -> ProducerConfig:
    rows = ensure_rows([write_chats(12)], load_tokenizer(tiny_target), tmp_path / "rows", max_seq_len=128)
    shape = SlotShape(256, 64, 32, "float32")
    return ProducerConfig(tiny_target, (1, 5), True, {"train": str(rows)}, 128, shape, num_threads=1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def take_all(stream) -> dict[int, dict[str, torch.Tensor]]:
    batches = {}
    while True:
        try:
            batch = stream.get()
        except StopIteration:
            return batches
        batches[batch.number] = {k: v.clone() for k, v in vars(batch.views).items()}
        batch.release()


def test_pool_delivers_in_plan_order_what_an_inline_source_makes(config: ProducerConfig) -> None:
    torch.set_num_threads(1)
    inline = take_all(InlineSource(config, "cpu").open("train", iter(ENTRIES)))
    pool = ProducerPool(config, ["cpu", "cpu"], {"train": 2})
    try:
        pooled = take_all(pool.open("train", iter(ENTRIES)))
        assert list(pooled) == list(inline) == [n for n, _ in ENTRIES]
        for number, tensors in inline.items():
            for name, tensor in tensors.items():
                assert torch.equal(pooled[number][name], tensor), (number, name)
        stages = {s for stats in pool.lanes().values() for s in stats.cumulative()}
        assert {"target.model_forward", "target.pack_hidden", "target.load_batch"} <= stages
        again = take_all(pool.open("train", iter(ENTRIES[3:])))
        assert list(again) == [3, 4, 5], "a stream may be opened anew"
    finally:
        pool.close()
    assert not any(alive(w.process.pid) for w in pool.workers)


def test_the_queue_is_bounded_and_closing_it_full_does_not_hang(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    stream = pool.open("train", iter(ENTRIES))
    stream.get()
    deadline = time.monotonic() + 30
    while pool.ready("train") != (1, 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert pool.ready("train") == (1, 2), "one slot is taken, one is ready, none is left"
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert not any(alive(w.process.pid) for w in pool.workers)


def test_min_ready_holds_back_until_enough_is_ready(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 3}, min_ready=3)
    try:
        stream = pool.open("train", iter(ENTRIES))
        batch = stream.get()
        assert pool.ready("train")[0] == 2
        batch.release()
        assert len(take_all(stream)) == 5, "ignored at the end of the stream"
    finally:
        pool.close()


def test_d07_an_error_while_loading_comes_with_its_traceback(config: ProducerConfig, tmp_path: Path) -> None:
    broken = ProducerConfig(**{**vars(config), "rows": {"train": str(tmp_path / "nowhere")}})
    pool = ProducerPool(broken, ["cpu"], {"train": 2})
    try:
        with pytest.raises(ProducerError, match=r"(?s)producer on cpu \(pid \d+\) failed:.*nowhere"):
            pool.open("train", iter(ENTRIES)).get()
    finally:
        pool.close()


def test_an_error_on_a_batch_comes_with_its_traceback(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    try:
        stream = pool.open("train", iter([(0, [0, 1]), (1, [999])]))
        with pytest.raises(ProducerError, match=r"(?s)Traceback.*999"):
            take_all(stream)
    finally:
        pool.close()


def test_a_killed_worker_ends_the_stream_with_its_signal(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    try:
        stream = pool.open("train", iter(ENTRIES))
        stream.get().release()
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ProducerError, match="killed by SIGKILL"):
            take_all(stream)
        assert time.monotonic() - started < 10
    finally:
        pool.close()


def test_slots_do_not_overlap() -> None:
    memory = SlotMemory(SlotShape(10, 6, 3, "bfloat16"), 3)
    for slot in range(3):
        for tensor in vars(memory.views(slot)).values():
            tensor.fill_(slot + 1)
    for slot in range(3):
        assert all((tensor == slot + 1).all() for tensor in vars(memory.views(slot)).values())
    other = SlotMemory(memory.shape, 3, os.dup(memory.fd))
    other.views(1).hidden_states.fill_(7)
    assert (memory.views(1).hidden_states == 7).all(), "both map the same memory"
    memory.close()
    other.close()


def test_worker_sees_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert worker_environment(3)["CUDA_VISIBLE_DEVICES"] == "3"
    assert worker_environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert worker_environment(1)["CUDA_VISIBLE_DEVICES"] == "6"
