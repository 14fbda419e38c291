"""Producers in processes of their own and inside the training process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_lightning.data import ensure_rows
from dflash_lightning.producer.pool import ProducerPool
from dflash_lightning.producer.process import worker_environment
from dflash_lightning.producer.produce import ProducerConfig, RowProducer
from dflash_lightning.producer.ranks import RankSource
from dflash_lightning.producer.slots import SlotMemory, SlotShape
from dflash_lightning.producer.source import InlineSource, ProducedBatch, ProducerError
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


def opened(source, entries):
    return source.open("train", iter(entries), [number for number, _ in entries])


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
    inline = take_all(opened(InlineSource(config, "cpu"), ENTRIES))
    pool = ProducerPool(config, ["cpu", "cpu"], {"train": 2})
    try:
        pooled = take_all(opened(pool, ENTRIES))
        assert list(pooled) == list(inline) == [n for n, _ in ENTRIES]
        for number, tensors in inline.items():
            for name, tensor in tensors.items():
                assert torch.equal(pooled[number][name], tensor), (number, name)
        stages = {s for stats in pool.lanes().values() for s in stats.cumulative()}
        assert {"target.model_forward", "target.pack_hidden", "target.load_batch"} <= stages
        again = take_all(opened(pool, ENTRIES[3:]))
        assert list(again) == [3, 4, 5], "a stream may be opened anew"
    finally:
        pool.close()
    assert not any(alive(w.process.pid) for w in pool.workers)


def test_the_queue_is_bounded_and_closing_it_full_does_not_hang(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    stream = opened(pool, ENTRIES)
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
        stream = opened(pool, ENTRIES)
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
            opened(pool, ENTRIES).get()
    finally:
        pool.close()


def test_an_error_on_a_batch_comes_with_its_traceback(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    try:
        stream = opened(pool, [(0, [0, 1]), (1, [999])])
        with pytest.raises(ProducerError, match=r"(?s)Traceback.*999"):
            take_all(stream)
    finally:
        pool.close()


def test_a_killed_worker_ends_the_stream_with_its_signal(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    try:
        stream = opened(pool, ENTRIES)
        stream.get().release()
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ProducerError, match="killed by SIGKILL"):
            take_all(stream)
        assert time.monotonic() - started < 10
    finally:
        pool.close()


def test_a_killed_worker_starts_again_and_nothing_is_lost(config: ProducerConfig) -> None:
    entries = [(n, [n % 12]) for n in range(60)]
    expected = take_all(opened(InlineSource(config, "cpu"), entries))
    pool = ProducerPool(config, ["cpu", "cpu"], {"train": 2}, max_restarts=2)
    try:
        stream = opened(pool, entries)
        got = {}
        for number, _ in entries:
            if number in (5, 20):
                os.kill(pool.workers[number % 2].process.pid, signal.SIGKILL)
            batch = stream.get()
            assert batch.number == number
            got[number] = {k: v.clone() for k, v in vars(batch.views).items()}
            batch.release()
        for number, tensors in expected.items():
            assert all(torch.equal(got[number][k], v) for k, v in tensors.items())
    finally:
        pool.close()


def test_restarts_are_limited_and_counted(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 1}, max_restarts=1)
    try:
        stream = opened(pool, [(n, [0]) for n in range(1000)])
        stream.get().release()
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        stream.get().release()
        while pool._restarts[0] == 0 or pool._due:
            stream.get().release()
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(ProducerError, match=r"killed by SIGKILL after 1 restarts \(data\.max_restarts=1\)"):
            take_all(stream)
    finally:
        pool.close()


@pytest.mark.slow
def test_a_stopped_worker_is_found_by_its_silence(config: ProducerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_lightning.producer import pool as pool_module

    monkeypatch.setattr(pool_module, "_SILENCE_SECONDS", 8.0)
    pool = ProducerPool(config, ["cpu"], {"train": 1})
    try:
        stream = opened(pool, [(n, [0]) for n in range(1000)])
        stream.get().release()
        os.kill(pool.workers[0].process.pid, signal.SIGSTOP)
        with pytest.raises(ProducerError, match="SIGKILL"):
            take_all(stream)
    finally:
        pool.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_a_node_get_their_own_batches_in_order(config: ProducerConfig, world_size: int) -> None:
    entries = [(n, [n % 12]) for n in range(3 * world_size + 1)]
    expected = take_all(opened(InlineSource(config, "cpu"), entries))
    ranks = tuple(range(world_size))
    pool = ProducerPool(config, ["cpu"], {"train": world_size}, ranks=ranks, world_size=world_size)
    assert pool.server is not None
    folder = Path(pool.server.path).parent
    assert folder.stat().st_mode & 0o077 == 0, "the socket lies in a private folder"
    sources = [pool, *(RankSource(pool.server.path, rank) for rank in ranks[1:])]
    try:
        for _ in range(2):  # two epochs
            streams = [
                source.open("train", iter(entries), [n for n, _ in entries if n % world_size == rank])
                for rank, source in enumerate(sources)
            ]
            got: list[dict] = [{} for _ in ranks]
            work = [
                lambda out=out, stream=stream: out.update(take_all(stream))
                for out, stream in zip(got, streams, strict=True)
            ]
            threads = [threading.Thread(target=target, daemon=True) for target in work]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            for rank in ranks:
                assert list(got[rank]) == [n for n, _ in entries if n % world_size == rank]
                for number, tensors in got[rank].items():
                    assert all(torch.equal(tensors[k], v) for k, v in expected[number].items())
            for stream in streams:
                stream.close()
    finally:
        for source in reversed(sources):
            source.close()
    assert not folder.exists()


def test_d08_tries_count_by_batch_not_in_all(config: ProducerConfig, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.symlink_to(config.target)
    flaky = replace(config, target=str(target), kind="tests.flaky_producer:FlakyProducer")
    entries = [(n, [n]) for n in range(12)]
    pool = ProducerPool(flaky, ["cpu", "cpu"], {"train": 4})
    try:
        assert list(take_all(opened(pool, entries))) == list(range(12)), "twelve failures, none twice for a batch"
    finally:
        pool.close()


def test_d08_an_error_reaches_every_rank(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2}, ranks=(0, 1), world_size=2)
    assert pool.server is not None
    other = RankSource(pool.server.path, 1)
    try:
        entries = [(0, [0]), (1, [999])]
        pool.open("train", iter(entries), [0])
        stream = other.open("train", iter(()), [1])
        with pytest.raises(ProducerError, match=r"(?s)Traceback.*999"):
            stream.get()
    finally:
        other.close()
        pool.close()


def test_b05_missing_state_rows_are_an_error_that_names_both_counts(config: ProducerConfig) -> None:
    producer = RowProducer(config, "cpu")
    forward = producer.target.forward
    producer.target.forward = lambda ids: [tap[:, :-1] for tap in forward(ids)]
    (longest,) = producer.rows.load("train", [4]).lengths
    with pytest.raises(ValueError, match=rf"rows \[4\] of train: {longest} tokens.* but {longest - 1} hidden states"):
        producer.produce("train", [4], SlotMemory(config.shape, 1).views(0))


def test_b06_rows_with_values_that_are_not_finite_are_dropped_alone(config: ProducerConfig, capfd) -> None:
    producer = RowProducer(config, "cpu")
    memory = SlotMemory(config.shape, 2)
    good = producer.produce("train", [3, 4, 5], memory.views(0))
    forward = producer.target.forward

    def broken(ids):
        taps = forward(ids)
        taps[1] = taps[1].clone()
        taps[1][1, 2, 7] = float("nan")
        taps[0] = taps[0].clone()
        taps[0][0, good[0] :] = float("inf")  # padding: nobody reads it
        return taps

    producer.target.forward = broken
    lengths = producer.produce("train", [3, 4, 5], memory.views(1))
    assert lengths == [good[0], 0, good[2]]
    assert "row 4 of train" in capfd.readouterr().out
    clean, kept = memory.views(0), memory.views(1)
    for name, tensor in vars(kept).items():
        whole = getattr(clean, name)
        expected = torch.cat([whole[: good[0]], whole[good[0] + good[1] : sum(good)]])
        assert torch.equal(tensor[: len(expected)], expected)
    batch = ProducedBatch(0, [3, 4, 5], lengths, kept)
    assert batch.row_ids == (3, 5)
    assert batch.num_tokens == good[0] + good[2]


def test_d02_too_many_slots_are_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_lightning.producer import slots

    monkeypatch.setattr(slots, "available_memory", lambda: 64 * 2**20)
    shape = SlotShape(1024, 1024, 0, "float32")
    with pytest.raises(ValueError, match=r"data\.queue_depth: 256 slots.*: 15 slots would fit"):
        slots.check_memory(shape, 256)
    slots.check_memory(shape, 15)
    monkeypatch.undo()
    assert slots.available_memory() > 0


def test_d01_descriptors_stay_constant(config: ProducerConfig) -> None:
    pool = ProducerPool(config, ["cpu"], {"train": 2})
    try:
        stream = opened(pool, [(n, [n % 12]) for n in range(60)])
        counts = []
        for _ in range(60):
            stream.get().release()
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert max(counts[5:]) == min(counts[5:])
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
