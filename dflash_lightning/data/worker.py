"""A worker process of `dflash prepare`: chunks in, rows out, over a socket.

Started by `pool.py`, never by a fork and never with the user's `__main__`. Its peer is the process that started it, so
messages are pickled. It ends when the socket closes: also when that process was killed.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .render import Renderer
from .work import chunk_rows


def main(descriptor: int) -> None:
    """Serve the socket `descriptor`: the arguments of a Renderer first, then chunks until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    connection = Connection(descriptor)
    try:
        renderer = _renderer(connection)
        while renderer:
            chunk, name, weight = connection.recv()
            _answer(connection, lambda: chunk_rows(chunk, name, weight, renderer))  # noqa: B023  (called at once)
    except (EOFError, ConnectionError):
        return


def _renderer(connection: Connection) -> Renderer | None:
    try:
        arguments, state = pickle.loads(connection.recv_bytes())
        renderer = Renderer(**arguments)
    except (EOFError, ConnectionError):
        raise
    except Exception:
        connection.send(("unfit", traceback.format_exc(limit=-1)))
        return None
    if not state["fast"]:
        renderer.encoder.fast = None
    renderer.encoder.checks_left = state["checks_left"]
    connection.send(("ready", None))
    return renderer


def _answer(connection: Connection, work: Any) -> None:
    try:
        answer = "rows", work()
    except ValueError as error:  # a user's mistake
        answer = "error", str(error)
    except Exception:
        answer = "crash", traceback.format_exc()
    connection.send(answer)
