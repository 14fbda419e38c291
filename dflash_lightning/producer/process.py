"""One worker process as the pool sees it: how it is started, spoken to, and how it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from dflash_lightning.producer.produce import ProducerConfig
from dflash_lightning.producer.slots import SlotMemory
from dflash_lightning.producer.source import ProducerError
from dflash_lightning.profiling import ProfileStats


class WorkerDiedError(ProducerError):
    """The process ended or fell silent; another one may take its place."""


class WorkerFailedError(ProducerError):
    """The worker raised while loading; another one would too."""


class WorkerProcess:
    """A started worker. Call from one thread, the one that lives as long as the pool.

    Args:
        config: what the worker needs.
        device: a CUDA index as this process counts them, or "cpu".
        memory: the slots that it writes into.
    """

    def __init__(self, config: ProducerConfig, device: int | str, memory: SlotMemory) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "dflash_lightning.producer.worker", str(theirs.fileno())]
        command += [str(memory.fd), str(memory.count), str(os.getpid())]
        self.device = device
        self.process = subprocess.Popen(
            command,
            env=worker_environment(device),
            pass_fds=(theirs.fileno(), memory.fd),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.ready = False
        self.held: list[Any] = []  # what was handed out and not answered, oldest first
        self.last_heard = time.monotonic()
        self.stats = ProfileStats()
        self.send({"config": config.to_json(), "device": "cpu" if device == "cpu" else "cuda:0"})

    @property
    def pid(self) -> int:
        return self.process.pid

    def __str__(self) -> str:
        return f"producer on {self.device if self.device == 'cpu' else f'cuda:{self.device}'} (pid {self.pid})"

    def send(self, message: dict[str, Any]) -> None:
        """Send a request. Raises WorkerDiedError when nobody listens."""
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise WorkerDiedError(self.how_it_ended()) from None

    def receive(self) -> dict[str, Any]:
        """The next answer; call when the connection is readable. Raises WorkerDiedError at the end of the process."""
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerDiedError(self.how_it_ended()) from None
        self.last_heard = time.monotonic()
        return message

    def how_it_ended(self) -> str:
        """A sentence with pid and exit code or signal."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            # It closed its connection and does not end: nothing can be had of it.
            self.process.kill()
            code = self.process.wait()
        if code < 0:
            return f"{self} was killed by {signal.Signals(-code).name}"
        return f"{self} ended with exit code {code}; its own output above says why"

    def end(self, deadline: float) -> None:
        """Close the connection, wait until `deadline` (monotonic), then kill."""
        self.connection.close()
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # It hangs in a driver call, say, and does not see its socket close.
            self.process.kill()
            self.process.wait()


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
