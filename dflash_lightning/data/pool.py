"""Processes that turn chunks into rows, in the order of the chunks and with few of them in flight."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from .render import Renderer
from .work import ChunkRows

# The parent's path, so that the worker finds the same packages wherever it starts and takes none from the work folder.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {} import main; main(int(sys.argv[1]))"
_AHEAD = 2  # chunks handed out beyond one a worker: a slow chunk does not stop the others

Tag = TypeVar("Tag")


class UnfitError(Exception):
    """The tokenizer cannot be made in another process."""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its control group's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


class WorkerPool:
    """`count` workers that start at once; use as a context manager.

    Raises ChildProcessError when a worker is killed.
    """

    def __init__(self, count: int) -> None:
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, "prepare")
        try:
            for _ in range(count):
                self._workers.append(_Worker())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def configure(self, renderer: Renderer) -> None:
        """Give the workers the renderer's arguments. Raises UnfitError when they cannot have its tokenizer."""
        encoder = renderer.encoder
        state = {"fast": encoder.fast is not None, "checks_left": encoder.checks_left}
        try:
            message = pickle.dumps((renderer.arguments(), state))
        except Exception as error:  # whatever a tokenizer's class raises
            raise UnfitError(str(error)) from error
        for worker in self._workers:
            worker.send_bytes(message)
        for worker in self._workers:
            kind, text = worker.receive()
            if kind == "unfit":
                raise UnfitError(text)
            self._idle.put(worker)

    def rows(self, jobs: Iterable[tuple[Tag, tuple[Any, str, float]]]) -> Iterator[tuple[Tag, ChunkRows]]:
        """The rows of each job (chunk, name, weight), in order, with the tag that came with it."""
        waiting: deque[tuple[Tag, Future[ChunkRows]]] = deque()
        for tag, job in jobs:
            waiting.append((tag, self._threads.submit(self._ask, job)))
            if len(waiting) >= len(self._workers) + _AHEAD:
                tag, future = waiting.popleft()
                yield tag, future.result()
        for tag, future in waiting:
            yield tag, future.result()

    def _ask(self, job: tuple[Any, str, float]) -> ChunkRows:
        worker = self._idle.get()
        try:
            worker.send_bytes(pickle.dumps(job))
            kind, answer = worker.receive()
        finally:
            self._idle.put(worker)  # also a dead one: a thread that waits for it learns so
        if kind == "error":
            raise ValueError(answer)
        if kind == "crash":
            raise RuntimeError(f"{worker} failed:\n{answer}")
        return answer

    def close(self) -> None:
        """End the workers, in the middle of their work if need be: nothing of theirs is lost."""
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.connection.close()


class _Worker:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        module = f"{__package__}.worker"
        command = [sys.executable, "-c", _START.format(module), str(theirs.fileno()), json.dumps(sys.path)]
        # One worker a core: threads of their own would only wait for each other. No worker needs a device.
        single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with ours, theirs:
            self.process = subprocess.Popen(
                command, env=os.environ | single, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
            self.connection = Connection(ours.detach())

    def __str__(self) -> str:
        return f"a worker of prepare (pid {self.process.pid})"

    def send_bytes(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._died() from None

    def receive(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> ChildProcessError:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = "; perhaps memory ran out: fewer workers need less" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"{self} {how}{reason}. The same command goes on where this one stopped")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
