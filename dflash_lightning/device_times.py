"""Stage times on the device's own clock: they stand beside the wall clock of the spans and are never added to it.

A span's wall time on a GPU is the time to queue its kernels. Two events around it say how long the device took; they
are read when they have passed, and nothing ever waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from dflash_lightning.profiling import ProfileStats, process_stats

SUFFIX = ".device"  # `drafter.forward.device` is the device's time of `drafter.forward`
# Events are looked at when so many wait, and forgotten from the oldest on above the second number.
_COLLECT_AT = 1024
_MOST_WAITING = 8192


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceTimes:
    """Times stages with a pair of events each.

    Args:
        make_event: gives an event with timing; None on devices without a clock of their own, where all is a no-op.
        stats: where the times go, under the stage's name with `.device`; None is the process's own.
    """

    def __init__(self, make_event: Callable[[], Event] | None, stats: ProfileStats | None = None) -> None:
        self._make = make_event
        self._stats = stats or process_stats()
        self._waiting: deque[tuple[str, Event, Event]] = deque()
        self._spare: list[Event] = []

    def begin(self) -> Event | None:
        """Mark now on the current stream."""
        if self._make is None or not self._stats.enabled:
            return None
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        return event

    def end(self, stage: str, begun: Event | None) -> None:
        """The stage that began at `begun` has been queued as a whole."""
        if begun is None:
            return
        ended = self.begin()
        if ended is None:
            return
        self._waiting.append((stage, begun, ended))
        if len(self._waiting) >= _COLLECT_AT:
            self.collect()
        while len(self._waiting) > _MOST_WAITING:
            self._spare += self._waiting.popleft()[1:]

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time the block's work on the device."""
        begun = self.begin()
        yield
        self.end(stage, begun)

    def collect(self) -> None:
        """Add the stages that the device has finished to the stats. Waits for nothing."""
        finished = ProfileStats()
        while self._waiting and self._waiting[0][2].query():
            stage, begun, ended = self._waiting.popleft()
            finished.add(stage + SUFFIX, begun.elapsed_time(ended) / 1e3)
            self._spare += (begun, ended)
        self._stats.merge(finished)


def device_times(device: torch.device) -> DeviceTimes:
    """Times on `device`: CUDA events, or nothing where the host does the work itself."""
    if device.type != "cuda":
        return DeviceTimes(None)
    return DeviceTimes(lambda: torch.cuda.Event(enable_timing=True))
