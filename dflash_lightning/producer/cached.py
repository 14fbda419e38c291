"""A producer that takes a batch from the hidden-state cache where it can, and from the target where it must."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_lightning.producer.cache import CacheConfig, StateCache, check_cache_folder, free_bytes, used_bytes
from dflash_lightning.producer.cache_file import BadEntryError, StateLayout, StoredRow
from dflash_lightning.producer.identity import target_identity
from dflash_lightning.producer.plan import BatchPlan
from dflash_lightning.producer.produce import Producer, ProducerConfig, TargetLoadError
from dflash_lightning.producer.rows import BatchRows, RowReader
from dflash_lightning.producer.slots import SlotViews
from dflash_lightning.profiling import span

# Batches that are looked up at the start, at most twice as many.
_SAMPLE = 1024


@dataclass
class _Found:
    """A batch whose states lie in the cache."""

    rows: BatchRows
    hashes: list[str]
    stored: list[StoredRow]


@dataclass
class _Made:
    """A batch that the target has made, `forwarded` as its producer gave it."""

    rows: BatchRows
    hashes: list[str]
    forwarded: Any


class CachedProducer:
    """A `Producer` behind a cache. The target is loaded at the first batch that is not there.

    Where the cache is empty it is loaded at once: what is wrong with it then shows before training begins.

    Args:
        config: as for the producer itself, with `cache`.
        load: makes the producer.

    Raises:
        TargetLoadError: from `forward` and `pack`, the target could not be loaded.
    """

    def __init__(self, config: ProducerConfig, load: Callable[[], Producer]) -> None:
        assert config.cache is not None
        self.rows = RowReader(config.rows, config.max_seq_len)
        self.cache = StateCache(config.cache, state_layout(config))
        self._load = load
        # `pack` may need a forward pass too, beside that of the next batch.
        self._lock = threading.Lock()
        self._producer = load() if self.cache.is_empty() else None

    def forward(self, stream: str, numbers: Sequence[int]) -> _Found | _Made:
        with span("target.load_batch"):
            rows = self.rows.load(stream, numbers)
            hashes = rows.hashes()
            stored = self.cache.find(hashes)
        if stored is not None:
            return _Found(rows, hashes, stored)
        return self._make(rows, hashes)

    def pack(self, made: _Found | _Made, out: SlotViews) -> list[int]:
        if isinstance(made, _Found):
            try:
                return self._read(made, out)
            except BadEntryError as error:
                self.cache.discard(error)
                made = self._make(made.rows, made.hashes)
        assert self._producer is not None
        lengths = self._producer.pack(made.forwarded, out)
        made.forwarded = None  # the taps' memory is the next batch's
        if self.cache.storing:
            with span("target.cache_write"):
                self.cache.store(made.hashes, lengths, _tensors(out.head(sum(lengths))))
        return lengths

    def _make(self, rows: BatchRows, hashes: list[str]) -> _Made:
        with self._lock:
            if self._producer is None:
                try:
                    self._producer = self._load()
                except Exception as error:
                    raise TargetLoadError(f"the target could not be loaded: {error}") from error
            return _Made(rows, hashes, self._producer.forward(rows.stream, rows.numbers))

    def _read(self, found: _Found, out: SlotViews) -> list[int]:
        lengths = [row.tokens for row in found.stored]
        with span("target.pack_hidden"):
            views = out.head(sum(lengths))
            self.cache.read(found.stored, _tensors(views))
            found.rows.write_tokens(lengths, views)
        for number, tokens in zip(found.rows.numbers, lengths, strict=True):
            if not tokens:
                print(
                    f"dropped row {number} of {found.rows.stream}: the target gave values that are not finite when "
                    "the cache was filled",
                    flush=True,
                )
        return lengths


def with_cache(
    config: ProducerConfig, folder: str, *, mode: str, limit_gb: float | None, writers: int
) -> ProducerConfig:
    """`config` with the cache in `folder`, which is made where it may be written.

    Args:
        mode, limit_gb: `data.cache_mode` and `data.cache_limit_gb`.
        writers: producers of the run on all nodes; they share what is left of the limit.
    """
    path = Path(folder).expanduser().absolute()
    check_cache_folder(path, mode == "read-only")
    identity = {
        "target": target_identity(config.target),
        "layer_ids": list(config.layer_ids),
        "last_hidden_state": config.last_hidden_state,
        "width": config.shape.width,
        "dtype": config.shape.dtype,
        # These two change the last bits.
        "attn_implementation": config.attn_implementation,
        "compile": config.compile,
    }
    limit = None if limit_gb is None else int(limit_gb * 1e9)
    cache = CacheConfig(str(path), identity, mode == "read-only", limit, writers)
    state_layout(config)  # a dtype that cannot be stored is an error here, not in the workers
    return replace(config, cache=cache)


def state_layout(config: ProducerConfig) -> StateLayout:
    """What the states of this configuration look like in a file."""
    return StateLayout(config.shape.width, config.shape.last_width, config.shape.dtype)


def cache_report(config: ProducerConfig, plans: Mapping[str, BatchPlan]) -> str:
    """What the cache will need for these plans, what it may take, and how many of the batches are there.

    Of large plans a sample is looked up: hashing a billion tokens takes seconds.
    """
    assert config.cache is not None
    folder, limit = config.cache.folder, config.cache.limit_bytes
    tokens = sum(int(plan.lengths.sum()) for plan in plans.values())
    needed = tokens * state_layout(config).token_bytes
    looked_at, found = _count_present(config, plans)
    batches = sum(map(len, plans.values()))
    if looked_at < batches:
        there = f"about {found / looked_at:.0%} of {batches:,} batches are there"
    else:
        there = f"{found:,} of {batches:,} batches are there"
    room = f"limit {limit / 1e9:.3f} GB, " if limit is not None else ""
    text = (
        f"data.cache_dir={folder}: {needed / 1e9:.3f} GB for {tokens:,} tokens "
        f"({room}{free_bytes(folder) / 1e9:.3f} GB of the disk free); {there}"
    )
    missing = needed * (1 - found / max(1, looked_at))
    space = free_bytes(folder)
    if limit is not None:
        space = min(space, limit - used_bytes(folder))
    if missing > space and not config.cache.read_only:
        text += f". It holds only {max(0, space) / 1e9:.3f} GB more: the rest is made anew in every epoch"
    return text


def _count_present(config: ProducerConfig, plans: Mapping[str, BatchPlan]) -> tuple[int, int]:
    """Batches looked up, and those of them that are there."""
    batches = [(name, number) for name, plan in plans.items() for number in range(len(plan))]
    lookup = StateLookup(config)
    if lookup.is_empty():
        return len(batches), 0
    batches = batches[:: max(1, len(batches) // _SAMPLE)]
    return len(batches), sum(lookup.holds(name, plans[name][n]) for name, n in batches)


class StateLookup:
    """Says which batches a run's cache holds; reads headers alone and writes nothing."""

    def __init__(self, config: ProducerConfig) -> None:
        assert config.cache is not None
        self._cache = StateCache(replace(config.cache, read_only=True), state_layout(config))
        self._rows = RowReader(config.rows, config.max_seq_len)

    def is_empty(self) -> bool:
        return self._cache.is_empty()

    def holds(self, stream: str, numbers: Sequence[int]) -> bool:
        """Whether a producer would find rows `numbers` of `stream`, as this batch or row by row."""
        return self._cache.find(self._rows.load(stream, numbers).hashes()) is not None


def _tensors(views: SlotViews) -> dict[str, Tensor]:
    named = {"hidden_states": views.hidden_states, "last_hidden_state": views.last_hidden_state}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
