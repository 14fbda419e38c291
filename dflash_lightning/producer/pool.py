"""Worker processes, one a target device, and the bounded queue of batches they fill.

One thread starts the workers, hands out batches and takes results; it lives as long as the pool, because the kernel's
parent-death signal follows the thread that started a process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from dflash_lightning.producer.produce import ProducerConfig
from dflash_lightning.producer.slots import SlotMemory
from dflash_lightning.producer.source import Entry, ProducedBatch, ProducerError, Stream
from dflash_lightning.profiling import ProfileStats, StageTotal

# Batches a worker holds: the running one and the next, so that it never waits for an answer between two.
_BATCHES_PER_WORKER = 2
_POLL_SECONDS = 0.5


@dataclass
class _Worker:
    device: str
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    outstanding: int = 0
    stats: ProfileStats = field(default_factory=ProfileStats)


class ProducerPool:
    """Feeds streams of hidden states from worker processes.

    Args:
        config: what every worker needs.
        devices: one worker an entry: a CUDA index or "cpu".
        slots: stream name -> batches of it that may be produced and not yet taken.
        min_ready: `get` waits until so many batches are ready; clamped to what the slots allow, ignored at the end.
    """

    def __init__(
        self, config: ProducerConfig, devices: Sequence[int | str], slots: dict[str, int], min_ready: int = 1
    ) -> None:
        self._config = config
        self._devices = list(devices)
        self._condition = threading.Condition()
        self._error: ProducerError | None = None
        self._closing = False
        self._generation = 0
        self._streams: dict[str, _PoolStream] = {}
        self._slot_range: dict[str, range] = {}
        first = 0
        for name, count in slots.items():
            self._slot_range[name] = range(first, first + count)
            first += count
        self._free: dict[str, deque[int]] = {name: deque(r) for name, r in self._slot_range.items()}
        self.memory = SlotMemory(config.shape, first)
        self.min_ready = min_ready
        self.workers: list[_Worker] = []
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._thread = threading.Thread(target=self._run, name="dflash-producer-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # Called by the loader's threads and the trainer's main thread.

    def open(self, name: str, entries: Sequence[Entry] | Iterator[Entry]) -> Stream:
        with self._condition:
            if name in self._streams:
                self._close_stream(self._streams[name])
            self._generation += 1
            stream = _PoolStream(self, name, iter(entries), self._generation)
            self._streams[name] = stream
        self._wake()
        return stream

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def ready(self, name: str) -> tuple[int, int]:
        stream = self._streams.get(name)
        return (len(stream.ready) if stream else 0), len(self._slot_range[name])

    def lanes(self) -> dict[str, ProfileStats]:
        return {f"producer{i}": worker.stats for i, worker in enumerate(self.workers)}

    def close(self) -> None:
        with self._condition:
            already, self._closing = self._closing, True
            self._condition.notify_all()
        atexit.unregister(self.close)
        if already:
            return
        self._wake()
        self._thread.join(timeout=8)
        self.memory.close()

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except (BlockingIOError, OSError):  # full: a wake-up is already on its way; closed: nobody to wake
            pass

    # The pool's own thread.

    def _run(self) -> None:
        try:
            for device in self._devices:
                self.workers.append(self._start(device))
            while not self._closing and self._error is None:
                self._hand_out()
                connections = [w.connection for w in self.workers]
                for source in wait([*connections, self._wake_r], timeout=_POLL_SECONDS):
                    if source == self._wake_r:
                        os.read(self._wake_r, 4096)
                        continue
                    self._receive(next(w for w in self.workers if w.connection is source))
        except ProducerError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ProducerError(f"the producer pool failed: {error!r}"))
        finally:
            self._end_workers()
            os.close(self._wake_r)
            os.close(self._wake_w)

    def _start(self, device: int | str) -> _Worker:
        ours, theirs = socket.socketpair()
        pass_fds = (theirs.fileno(), self.memory.fd)
        command = [sys.executable, "-m", "dflash_lightning.producer.worker", str(theirs.fileno())]
        command += [str(self.memory.fd), str(self.memory.count), str(os.getpid())]
        process = subprocess.Popen(command, env=worker_environment(device), pass_fds=pass_fds, stdin=subprocess.DEVNULL)
        theirs.close()
        worker = _Worker(str(device), process, Connection(ours.detach()))
        torch_device = "cpu" if device == "cpu" else "cuda:0"
        self._send(worker, {"config": self._config.to_json(), "device": torch_device})
        return worker

    def _hand_out(self) -> None:
        """Bind free slots to the next batches in plan order and send them to the least loaded workers."""
        with self._condition:
            # Validation goes first: the trainer stands still while it waits for it.
            streams = sorted(self._streams.values(), key=lambda s: s.name == "train")
            for stream in streams:
                while self._free[stream.name] and not stream.exhausted:
                    idle = min(self.workers, key=lambda w: (w.outstanding, not w.ready))
                    if idle.outstanding >= _BATCHES_PER_WORKER:
                        return
                    entry = next(stream.entries, None)
                    if entry is None:
                        stream.exhausted = True
                        self._condition.notify_all()
                        break
                    number, rows = entry
                    slot = self._free[stream.name].popleft()
                    stream.pending[number] = (slot, rows)
                    idle.outstanding += 1
                    request = {"stream": stream.name, "generation": stream.generation, "number": number}
                    self._send(idle, {**request, "rows": rows, "slot": slot})

    def _send(self, worker: _Worker, message: dict[str, Any]) -> None:
        try:
            worker.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            self._receive(worker)  # it ended; its last words or its exit code say why
            raise ProducerError(_how_it_ended(worker)) from None

    def _receive(self, worker: _Worker) -> None:
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            raise ProducerError(_how_it_ended(worker)) from None
        if message["op"] == "error":
            raise ProducerError(f"{_who(worker)} failed:\n{message['traceback']}")
        worker.ready = True
        if message["op"] != "done":
            return
        worker.outstanding -= 1
        worker.stats.merge({s: StageTotal(*values) for s, values in message["spans"].items()})
        with self._condition:
            stream = self._streams.get(message["stream"])
            if stream is None or stream.generation != message["generation"]:
                self._free[message["stream"]].append(message["slot"])
                return
            number = message["number"]
            slot, rows = stream.pending.pop(number)
            assert slot == message["slot"]
            stream.ready[number] = _PooledBatch(
                number, rows, message["lengths"], self.memory.views(slot), pool=self, slot=slot, name=stream.name
            )
            self._condition.notify_all()

    def _fail(self, error: ProducerError) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def _end_workers(self) -> None:
        for worker in self.workers:
            worker.connection.close()
        # A worker that hangs in a driver call does not see its socket close.
        deadline = time.monotonic() + 3
        for worker in self.workers:
            try:
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    # Under the condition's lock.

    def _close_stream(self, stream: _PoolStream) -> None:
        if self._streams.get(stream.name) is not stream:
            return
        del self._streams[stream.name]
        for batch in stream.ready.values():
            self._free[stream.name].append(batch.slot)
        stream.ready.clear()
        stream.closed = True
        self._condition.notify_all()


class _PooledBatch(ProducedBatch):
    def __init__(self, *args: Any, pool: ProducerPool, slot: int, name: str) -> None:
        super().__init__(*args)
        self._pool = pool
        self.slot = slot
        self._name = name

    def release(self) -> None:
        with self._pool._condition:
            self._pool._free[self._name].append(self.slot)
        self._pool._wake()


class _PoolStream:
    def __init__(self, pool: ProducerPool, name: str, entries: Iterator[Entry], generation: int) -> None:
        self.pool = pool
        self.name = name
        self.entries = entries
        self.generation = generation
        self.pending: dict[int, tuple[int, list[int]]] = {}  # handed out, in plan order: number -> slot, rows
        self.ready: dict[int, _PooledBatch] = {}
        self.exhausted = False
        self.closed = False

    def _next_number(self) -> int | None:
        numbers = (*self.pending, *self.ready)
        return min(numbers) if numbers else None

    def _enough_ready(self) -> bool:
        slots = len(self.pool._slot_range[self.name])
        return len(self.ready) >= min(self.pool.min_ready, slots) or (self.exhausted and not self.pending)

    def get(self) -> ProducedBatch:
        with self.pool._condition:
            while True:
                self.pool.check()
                if self.closed or self.pool._closing:
                    raise StopIteration
                number = self._next_number()
                if number is None and self.exhausted:
                    raise StopIteration
                if number in self.ready and self._enough_ready():
                    return self.ready.pop(number)
                self.pool._condition.wait(_POLL_SECONDS)

    def close(self) -> None:
        with self.pool._condition:
            self.pool._close_stream(self)
        self.pool._wake()


def worker_environment(device: int | str) -> dict[str, str]:
    """The environment of the worker on `device`: it sees that device and no other.

    A CUDA index counts the devices that this process sees: it is looked up in CUDA_VISIBLE_DEVICES where that is set.
    """
    environment = dict(os.environ)
    visible = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment["CUDA_VISIBLE_DEVICES"] = visible[int(device)] if visible else str(device)
    return environment


def _who(worker: _Worker) -> str:
    return f"producer on {worker.device} (pid {worker.process.pid})"


def _how_it_ended(worker: _Worker) -> str:
    try:
        code = worker.process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        return f"{_who(worker)} closed its connection and does not end"
    if code < 0:
        return f"{_who(worker)} was killed by {signal.Signals(-code).name}"
    return f"{_who(worker)} ended with exit code {code}; its own output above says why"
