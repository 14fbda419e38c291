"""Processes that must not outlive the one that started them: each would hold the memory of a GPU."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, however that happens. Linux only.

    A parent that died before the call is not noticed: where its pid is known, compare `os.getppid()` afterwards.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
