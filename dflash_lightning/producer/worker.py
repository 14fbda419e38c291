"""One producer process: a target replica on one device that fills slots on request.

Started as `python -m dflash_lightning.producer.worker` with the numbers of two inherited descriptors: a socket (JSON
messages, each with its length before it) and the slot memory. It ends by itself when the socket closes or when its
parent dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Serve batches until the socket closes. Arguments: socket fd, memory fd, number of slots, parent's pid."""
    socket_fd, memory_fd, count, parent = (int(a) for a in argv)
    # Ctrl-C goes to the whole process group; the trainer decides when its producers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took hold
        return 1
    connection = Connection(socket_fd)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    try:
        _serve(connection, requests, memory_fd, count)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except Exception:
        _send(connection, {"op": "error", "traceback": traceback.format_exc()})
        return 1
    return 0


def _receive(connection: Connection, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            # The trainer is gone or closes the pool: nothing here is worth finishing.
            os._exit(0)
        requests.put(json.loads(message))


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _serve(connection: Connection, requests: queue.SimpleQueue[dict[str, Any]], memory_fd: int, count: int) -> None:
    setup = requests.get()
    import torch

    from dflash_lightning.producer.produce import ProducerConfig, RowProducer
    from dflash_lightning.producer.slots import SlotMemory
    from dflash_lightning.profiling import process_stats, span

    config = ProducerConfig.from_json(setup["config"])
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    memory = SlotMemory(config.shape, count, memory_fd)
    producer = RowProducer(config, setup["device"])
    _send(connection, {"op": "ready"})
    while True:
        with span("target.queue_put_wait"):
            request = requests.get()
        lengths = producer.produce(request["stream"], request["rows"], memory.views(request["slot"]))
        spans = {s: [t.count, t.total, t.max] for s, t in process_stats().window().items()}
        _send(
            connection,
            {
                "op": "done",
                "stream": request["stream"],
                "number": request["number"],
                "generation": request["generation"],
                "slot": request["slot"],
                "lengths": lengths,
                "spans": spans,
            },
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
