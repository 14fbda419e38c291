"""The hidden-state queue: which batch lies in which slot, who makes it, who takes it. Bookkeeping only, no I/O.

A slot is bound to a batch when the batch is handed out, in plan order, never when a worker finishes: the order of
batches and freedom from deadlock do not depend on timing. Callers hold the pool's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_lightning.producer.source import Entry


@dataclass
class Job:
    """One batch from hand-out to release."""

    stream: StreamState
    number: int
    rows: list[int]
    slot: int
    lengths: list[int] = field(default_factory=list)
    attempts: int = 0
    avoid: Any = None  # the worker on which it failed

    def request(self) -> dict[str, Any]:
        """What a worker is told."""
        return {"stream": self.stream.name, "number": self.number, "rows": self.rows, "slot": self.slot}


@dataclass
class StreamState:
    """One pass over a plan's batches for the ranks of a node."""

    name: str
    generation: int
    entries: Iterator[Entry]
    world_size: int
    open_ranks: set[int]
    pending: dict[int, Job] = field(default_factory=dict)
    ready: dict[int, Job] = field(default_factory=dict)
    exhausted: bool = False

    def next_entry(self) -> Entry | None:
        """The next batch that somebody still wants; None at the end."""
        for number, rows in self.entries:
            if number % self.world_size in self.open_ranks:
                return number, rows
        self.exhausted = True
        return None


class SlotQueue:
    """Slots and streams of one pool.

    Args:
        slots: stream name -> number of slots; the names' slots follow each other in memory.
        min_ready: batches that must be ready before one is given out; clamped to the slots, ignored at the end.
    """

    def __init__(self, slots: dict[str, int], min_ready: int) -> None:
        self.capacity = dict(slots)
        self.min_ready = min_ready
        self.count = sum(slots.values())
        self.streams: dict[tuple[str, int], StreamState] = {}
        self.retries: deque[Job] = deque()
        self._free: dict[str, deque[int]] = {}
        first = 0
        for name, count in slots.items():
            self._free[name] = deque(range(first, first + count))
            first += count

    def open(self, stream: StreamState) -> None:
        self.streams[stream.name, stream.generation] = stream

    def close(self, name: str, generation: int, rank: int) -> None:
        """Rank `rank` takes nothing more of this stream; what waits for it is given up."""
        stream = self.streams.get((name, generation))
        if stream is None:
            return
        stream.open_ranks.discard(rank)
        for number in [n for n in stream.ready if n % stream.world_size == rank]:
            self.free(name, stream.ready.pop(number).slot)
        if not stream.open_ranks:
            del self.streams[name, generation]

    def free(self, name: str, slot: int) -> None:
        self._free[name].append(slot)

    def next_job(self) -> Job | None:
        """The next batch to hand out, bound to a slot: retries first, then validation, then older before newer."""
        if self.retries:
            return self.retries.popleft()
        for stream in sorted(self.streams.values(), key=lambda s: (s.name == "train", s.generation)):
            if stream.exhausted or not self._free[stream.name]:
                continue
            entry = stream.next_entry()
            if entry is not None:
                job = Job(stream, *entry, slot=self._free[stream.name].popleft())
                stream.pending[job.number] = job
                return job
        return None

    def finish(self, job: Job, lengths: list[int]) -> None:
        """A worker has written the batch; it may be taken now."""
        stream = job.stream
        stream.pending.pop(job.number, None)
        if job.number % stream.world_size in stream.open_ranks:
            job.lengths = lengths
            stream.ready[job.number] = job
        else:
            self.free(stream.name, job.slot)

    def take(self, name: str, generation: int, number: int) -> Job | None:
        """The batch if it may be given out now."""
        stream = self.streams.get((name, generation))
        if stream is None or number not in stream.ready:
            return None
        at_end = stream.exhausted and not stream.pending
        if len(stream.ready) < min(self.min_ready, self.capacity[name]) and not at_end:
            return None
        return stream.ready.pop(number)

    def ready_count(self, name: str) -> int:
        return sum(len(s.ready) for s in self.streams.values() if s.name == name)
