"""One producer process: a target replica on one device that fills slots on request.

Started as `python -m dflash_lightning.producer.worker` with the numbers of two inherited descriptors: a socket (JSON
messages, each with its length before it) and the slot memory. It ends by itself when the socket closes or when its
parent dies.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from dflash_lightning.orphans import end_with_parent

_BEAT_SECONDS = 5.0
Message = dict[str, Any]


def main(argv: list[str]) -> int:
    """Serve batches until the socket closes. Arguments: socket fd, memory fd, number of slots, parent's pid."""
    socket_fd, memory_fd, count, parent = (int(a) for a in argv)
    # Ctrl-C goes to the whole process group; the trainer decides when its producers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:  # the parent died before that took hold
        return 1
    worker = _Worker(Connection(socket_fd))
    try:
        worker.serve(memory_fd, count)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except Exception:
        worker.send({"op": "error", "traceback": traceback.format_exc()})
        return 1
    return 0


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # One batch is packed while the next one is in the target; a longer queue would only hold more memory.
        self._made: queue.Queue[tuple[Message, Any]] = queue.Queue(1)
        for work in (self._receive, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: Message) -> None:
        with self._send_lock:
            self._connection.send_bytes(json.dumps(message).encode())

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                # The trainer is gone or closes the pool: nothing here is worth finishing.
                os._exit(0)
            self._requests.put(json.loads(message))

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            try:
                self.send({"op": "beat"})
            except OSError:
                return

    def serve(self, memory_fd: int, count: int) -> None:
        """Load the target, then run its forward passes in this thread and the packing in another."""
        setup = self._requests.get()
        import torch

        from dflash_lightning.producer.produce import ProducerConfig, make_producer
        from dflash_lightning.producer.slots import SlotMemory
        from dflash_lightning.profiling import span

        config = ProducerConfig.from_json(setup["config"])
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._memory = SlotMemory(config.shape, count, memory_fd)
        # Pinning takes the device: a worker that finds everything in the cache leaves it alone.
        pin = (lambda: None) if setup["device"] == "cpu" else self._memory.pin
        self._producer = make_producer(config, setup["device"], pin)
        threading.Thread(target=self._pack, args=(config.num_threads,), daemon=True).start()
        self.send({"op": "ready"})
        while True:
            request = self._requests.get()
            try:
                made = self._producer.forward(request["stream"], request["rows"])
            except Exception as error:
                self._failed(request, error)
                continue
            with span("target.queue_put_wait"):
                self._made.put((request, made))

    def _pack(self, num_threads: int | None) -> None:
        import torch

        from dflash_lightning.profiling import process_stats

        if num_threads:
            torch.set_num_threads(num_threads)
        reported = 0.0
        while True:
            request, made = self._made.get()
            try:
                lengths = self._producer.pack(made, self._memory.views(request["slot"]))
            except Exception as error:
                self._failed(request, error)
                continue
            finally:
                del made  # the taps' memory is the next batch's
            spans, reported = process_stats().report(since=reported), time.perf_counter()
            self._answer(request, {"op": "done", "lengths": lengths, "spans": spans})

    def _failed(self, request: Message, error: Exception) -> None:
        from dflash_lightning.producer.produce import TargetLoadError

        if isinstance(error, TargetLoadError):  # as if it had come up before the first batch: the run ends
            self._answer(request, {"op": "error", "traceback": traceback.format_exc()})
            return
        self._answer(request, {"op": "failed", "traceback": traceback.format_exc(), "spans": None})

    def _answer(self, request: Message, message: Message) -> None:
        try:
            self.send({"number": request["number"], "slot": request["slot"], **message})
        except OSError:
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
