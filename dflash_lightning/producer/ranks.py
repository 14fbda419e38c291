"""How the other ranks of a node are fed from the pool in local rank 0: a Unix socket and the shared slots.

The socket lies in a private folder; the slots' descriptor is handed over it, the batches themselves are never copied.
Messages are JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_lightning.producer.queue import SlotQueue
from dflash_lightning.producer.slots import SlotMemory, SlotShape
from dflash_lightning.producer.source import Entry, ProducedBatch, ProducerError, Stream
from dflash_lightning.profiling import ProfileStats

_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.5
# What a rank gets to end by itself (its collective fails, say) when the pool's process is gone.
_GRACE_SECONDS = 5.0
_STEPS_KEPT = 10_000  # a rank's steps between two profile windows


class RankProfile:
    """The spans that one rank has reported, and its wait and backward time of each step since they were last taken."""

    def __init__(self) -> None:
        self.stats = ProfileStats()
        self.finished = False
        self._steps: deque[list[float]] = deque(maxlen=_STEPS_KEPT)

    def absorb(self, message: dict[str, Any]) -> None:
        self.stats.absorb(message["report"])
        self._steps.extend(message["steps"])
        self.finished = bool(message["finished"])

    def take_steps(self) -> list[list[float]]:
        """[batch of the rank, wait, backward] of every step not taken before."""
        return [self._steps.popleft() for _ in range(len(self._steps))]


class RankServer:
    """The pool's side. All methods but the constructor run in the pool's thread; those that say so, under its lock."""

    def __init__(self, queue: SlotQueue, memory: SlotMemory, expected: int) -> None:
        self._queue = queue
        self._memory = memory
        self._expected = expected
        self._folder = Path(tempfile.mkdtemp(prefix="dflash-"))
        self.path = str(self._folder / "pool")
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._clients: dict[Connection, list[dict[str, Any]]] = {}  # connection -> what it waits for
        self.profiles: dict[int, RankProfile] = {}

    def waiters(self) -> list[Any]:
        """What to watch for input."""
        return [*([self._listener] if self._listener else ()), *self._clients]

    def receive(self, source: Any) -> None:
        """Accept a rank or read one message of it. Under the lock."""
        if self._listener is not None and source is self._listener:
            accepted, _ = self._listener.accept()
            hello = {"shape": self._memory.shape.to_json(), "count": self._memory.count, "pid": os.getpid()}
            socket.send_fds(accepted, [json.dumps(hello).encode()], [self._memory.fd])
            self._clients[Connection(accepted.detach())] = []
            self._expected -= 1
            if self._expected == 0:
                self._stop_listening()  # all are here: a kill from now on leaves no file behind
            return
        try:
            message = json.loads(source.recv_bytes())
        except (EOFError, OSError):
            # A rank that ended; what it means for the run is Lightning's to decide.
            self._clients.pop(source).clear()
            source.close()
            return
        if message["op"] == "take":
            self._clients[source].append(message)
        elif message["op"] == "release":
            self._queue.free(message["name"], message["slot"])
        elif message["op"] == "profile":
            self.profiles.setdefault(message["rank"], RankProfile()).absorb(message)
        elif message["op"] == "close":
            self._clients[source] = [m for m in self._clients[source] if m["name"] != message["name"]]
            self._queue.close(message["name"], message["generation"], message["rank"])

    def serve(self) -> None:
        """Answer every waiting request that can be answered. Under the lock."""
        for connection, waiting in self._clients.items():
            for message in list(waiting):
                job = self._queue.take(message["name"], message["generation"], message["number"])
                if job is None:
                    continue
                waiting.remove(message)
                answer = {"op": "batch", "rows": job.rows, "lengths": job.lengths, "slot": job.slot}
                asked = {key: message[key] for key in ("name", "generation", "number")}
                self._send(connection, answer | asked)

    def close(self, error: ProducerError | None) -> None:
        """Say good-bye, or why the run ends."""
        for connection in self._clients:
            self._send(connection, {"op": "bye"} if error is None else {"op": "error", "text": str(error)})
            connection.close()
        self._clients.clear()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, connection: Connection, message: dict[str, Any]) -> None:
        try:
            connection.send_bytes(json.dumps(message).encode())
        except OSError:  # its end-of-file is read next
            pass


class RankSource:
    """A rank's side: a Source fed by the pool of local rank 0.

    Args:
        path: the pool's socket.
        rank: this process's global rank.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        connected = _connect(path)
        hello, fds, _, _ = socket.recv_fds(connected, 4096, 1)
        described = json.loads(hello)
        self.memory = SlotMemory(SlotShape(**described["shape"]), described["count"], fds[0])
        self._connection = Connection(connected.detach())
        self._send_lock = threading.Lock()
        self._condition = threading.Condition()
        self._answers: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._open: set[tuple[str, int]] = set()
        self._generations: dict[str, int] = {}
        self._error: ProducerError | None = None
        self._closing = False
        threading.Thread(target=self._receive, name="dflash-rank-source", daemon=True).start()

    def open(self, name: str, entries: Iterable[Entry], numbers: Sequence[int]) -> Stream:
        generation = self._generations.get(name, 0) + 1
        self._generations[name] = generation
        with self._condition:
            self._open.add((name, generation))
        return _RankStream(self, name, generation, numbers)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def ready(self, name: str) -> tuple[int, int]:
        return 0, 0

    def lanes(self) -> dict[str, ProfileStats]:
        return {}

    def send_profile(self, report: dict[str, Any], steps: list[list[float]], finished: bool) -> None:
        """Give local rank 0 this rank's spans (`ProfileStats.report`) and [batch, wait, backward] of its new steps."""
        message = {"report": report, "steps": steps[-_STEPS_KEPT:], "finished": finished}
        self.send({"op": "profile", "rank": self._rank, **message})

    def close(self) -> None:
        with self._condition:
            already, self._closing = self._closing, True
            self._condition.notify_all()
        if not already:
            self._connection.close()
            self.memory.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; an ended connection is reported by the receiving thread."""
        try:
            with self._send_lock:
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            pass

    def _receive(self) -> None:
        while True:
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError, TypeError):  # TypeError: closed by this process in the middle of a read
                message = {"op": "lost"}
            with self._condition:
                if message["op"] == "batch":
                    stream = (str(message["name"]), int(message["generation"]))
                    if stream in self._open:
                        self._answers[(*stream, int(message["number"]))] = message
                    else:  # given up in the meantime
                        self.send({"op": "release", "name": message["name"], "slot": message["slot"]})
                elif message["op"] == "error":
                    self._error = ProducerError(message["text"])
                elif message["op"] == "bye":
                    self._closing = True
                lost = message["op"] == "lost"
                # After a farewell or an error local rank 0 is alive and ends its ranks in order.
                orphaned = lost and not self._closing and self._error is None
                if orphaned:
                    self._error = ProducerError("the process of local rank 0, which owns the producers, is gone")
                self._condition.notify_all()
            if orphaned:
                self._end_unless_closed()
            if lost:
                return

    def _end_unless_closed(self) -> None:
        """End this process when it does not do so by itself: it may hang in a collective whose partner is gone, and
        hold a device for ever."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._closing:
                return
            time.sleep(0.1)
        os._exit(1)


class _RankStream:
    def __init__(self, source: RankSource, name: str, generation: int, numbers: Sequence[int]) -> None:
        self._source = source
        self._name = name
        self._generation = generation
        self._numbers = iter(numbers)
        self._closed = False

    def get(self) -> ProducedBatch:
        number = next(self._numbers)
        source = self._source
        key = (self._name, self._generation, number)
        source.send({"op": "take", "name": self._name, "generation": self._generation, "number": number})
        with source._condition:
            while key not in source._answers:
                source.check()
                if self._closed or source._closing:
                    raise StopIteration
                source._condition.wait(_POLL_SECONDS)
            answer = source._answers.pop(key)
        slot = answer["slot"]
        release = {"op": "release", "name": self._name, "slot": slot}
        views = source.memory.views(slot)
        return ProducedBatch(number, answer["rows"], answer["lengths"], views, lambda: source.send(release))

    def close(self) -> None:
        with self._source._condition:
            if self._closed:
                return
            self._closed = True
            self._source._open.discard((self._name, self._generation))
            left = [k for k in self._source._answers if k[:2] == (self._name, self._generation)]
            slots = [self._source._answers.pop(k)["slot"] for k in left]
            self._source._condition.notify_all()
        for slot in slots:
            self._source.send({"op": "release", "name": self._name, "slot": slot})
        self._source.send(
            {"op": "close", "name": self._name, "generation": self._generation, "rank": self._source._rank}
        )


def _connect(path: str) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise ProducerError(f"no producer pool answers at {path}: {error}") from None
            time.sleep(0.1)
