"""What the loader asks for hidden states, wherever they are made: in worker processes or in the training process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dflash_lightning.producer.produce import ProducerConfig, RowProducer
from dflash_lightning.producer.slots import SlotMemory, SlotViews
from dflash_lightning.profiling import ProfileStats

Entry = tuple[int, list[int]]  # global batch number, its row numbers


class ProducerError(RuntimeError):
    """A producer failed; the message holds its traceback or how its process ended."""


class ProducedBatch:
    """One batch as its producer left it. `release` gives the slot back; its tensors must not be used after that."""

    def __init__(self, number: int, row_ids: Sequence[int], lengths: Sequence[int], views: SlotViews) -> None:
        self.number = number
        self.row_ids = tuple(row_ids)
        self.lengths = list(lengths)
        self.num_tokens = sum(lengths)
        self.views = views.head(self.num_tokens)

    @property
    def hidden_states(self) -> Tensor:
        return self.views.hidden_states

    def release(self) -> None:
        """Let the producers reuse the memory."""


class Stream(Protocol):
    """Batches of one plan, in plan order."""

    def get(self) -> ProducedBatch:
        """The next batch; waits for it. Raises ProducerError when its producer failed, StopIteration at the end."""
        ...

    def close(self) -> None:
        """Give up what was not taken. Wakes a `get` that waits in another thread."""
        ...


class Source(Protocol):
    """Opens streams; one stream of a name at a time."""

    def open(self, name: str, entries: Sequence[Entry] | Iterator[Entry]) -> Stream:
        """Start producing `entries` in order. An open stream of the same name is closed first."""
        ...

    def check(self) -> None:
        """Raise ProducerError if a producer has failed."""
        ...

    def ready(self, name: str) -> tuple[int, int]:
        """Batches of stream `name` that wait to be taken, and how many may wait at most."""
        ...

    def lanes(self) -> dict[str, ProfileStats]:
        """Stage timings of each producer process, by name. Empty when production runs in this process."""
        ...

    def close(self) -> None:
        """End every producer. Safe to call twice and from any thread."""
        ...


class InlineSource:
    """Produces in the calling thread (`target_devices: []`): one slot, filled when a batch is asked for."""

    def __init__(self, config: ProducerConfig, device: torch.device | str) -> None:
        self._producer = RowProducer(config, device)
        self._memory = SlotMemory(config.shape, 1)

    def open(self, name: str, entries: Sequence[Entry] | Iterator[Entry]) -> Stream:
        return _InlineStream(self._producer, self._memory.views(0), name, iter(entries))

    def check(self) -> None:
        return None

    def ready(self, name: str) -> tuple[int, int]:
        return 0, 1

    def lanes(self) -> dict[str, ProfileStats]:
        return {}

    def close(self) -> None:
        self._memory.close()


class _InlineStream:
    def __init__(self, producer: RowProducer, views: SlotViews, name: str, entries: Iterator[Entry]) -> None:
        self._producer = producer
        self._views = views
        self._name = name
        self._entries = entries

    def get(self) -> ProducedBatch:
        number, rows = next(self._entries)
        lengths = self._producer.produce(self._name, rows, self._views)
        return ProducedBatch(number, rows, lengths, self._views)

    def close(self) -> None:
        return None
