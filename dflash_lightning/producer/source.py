"""What the loader asks for hidden states, wherever they are made: in worker processes or in the training process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from dflash_lightning.producer.produce import ProducerConfig, make_producer
from dflash_lightning.producer.slots import SlotMemory, SlotViews
from dflash_lightning.profiling import ProfileStats

Entry = tuple[int, list[int]]  # global batch number, its row numbers


class ProducerError(RuntimeError):
    """A producer failed; the message holds its traceback or how its process ended."""


class ProducedBatch:
    """One batch as its producer left it.

    Args:
        number: global batch number.
        row_ids: rows that are in it, in order.
        lengths: tokens of each.
        views: the slot's tensors, of which the first `num_tokens` rows count.
        release: gives the slot back; the tensors must not be used after that.
    """

    def __init__(
        self,
        number: int,
        row_ids: Sequence[int],
        lengths: Sequence[int],
        views: SlotViews,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        # A length of 0 marks a row that the producer dropped.
        kept = [(row, length) for row, length in zip(row_ids, lengths, strict=True) if length]
        self.number = number
        self.row_ids = tuple(row for row, _ in kept)
        self.lengths = [length for _, length in kept]
        self.num_tokens = sum(self.lengths)
        self.views = views.head(self.num_tokens)
        self.release = release


class Stream(Protocol):
    """A rank's batches of one plan, in plan order."""

    def get(self) -> ProducedBatch:
        """The next batch; waits for it. Raises ProducerError when its producer failed, StopIteration at the end."""
        ...

    def close(self) -> None:
        """Give up what was not taken. Wakes a `get` that waits in another thread."""
        ...


class Source(Protocol):
    """Opens streams. All ranks of a source open the same streams in the same order."""

    def open(self, name: str, entries: Iterable[Entry], numbers: Sequence[int]) -> Stream:
        """Start producing.

        Args:
            name: "train" or "val".
            entries: the batches of all ranks that this source feeds, in plan order.
            numbers: those that this rank takes, in order.
        """
        ...

    def check(self) -> None:
        """Raise ProducerError if a producer has failed."""
        ...

    def ready(self, name: str) -> tuple[int, int]:
        """Batches of stream `name` that wait to be taken, and how many may wait at most."""
        ...

    def lanes(self) -> dict[str, ProfileStats]:
        """Stage timings of each producer process, by name. Empty where this process does not own the producers."""
        ...

    def close(self) -> None:
        """End every producer. Safe to call twice and from any thread."""
        ...


class InlineSource:
    """Produces in the calling thread (`target_devices: []`): one slot, filled when a batch is asked for.

    Training goes on prefetching while validation asks for its batches, so whoever holds the slot holds a lock.
    """

    def __init__(self, config: ProducerConfig, device: torch.device | str) -> None:
        self._producer = make_producer(config, device)
        self._memory = SlotMemory(config.shape, 1)
        self._lock = threading.Lock()

    def open(self, name: str, entries: Iterable[Entry], numbers: Sequence[int]) -> Stream:
        wanted = set(numbers)
        return _InlineStream(self, name, (e for e in entries if e[0] in wanted))

    def produce(self, name: str, number: int, rows: list[int]) -> ProducedBatch:
        """Fill the slot; it is this batch's until its release."""
        self._lock.acquire()
        try:
            views = self._memory.views(0)
            lengths = self._producer.pack(self._producer.forward(name, rows), views)
        except BaseException:
            self._lock.release()
            raise
        return ProducedBatch(number, rows, lengths, views, self._lock.release)

    def check(self) -> None:
        return None

    def ready(self, name: str) -> tuple[int, int]:
        return 0, 1

    def lanes(self) -> dict[str, ProfileStats]:
        return {}

    def close(self) -> None:
        self._memory.close()


class _InlineStream:
    def __init__(self, source: InlineSource, name: str, entries: Iterator[Entry]) -> None:
        self._source = source
        self._name = name
        self._entries = entries

    def get(self) -> ProducedBatch:
        return self._source.produce(self._name, *next(self._entries))

    def close(self) -> None:
        return None
