"""The loader of one rank: takes produced batches, lays out anchors and labels beside the running step, hands them over.

Everything random about a batch follows from (seed, epoch, batch number, pass), never from global RNG state.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lightning.batch import BatchSpec, Cursor, HiddenStateBatch
from dflash_lightning.drafter.layout import draw_layout
from dflash_lightning.producer.plan import BatchPlan
from dflash_lightning.producer.source import ProducedBatch, Source, Stream
from dflash_lightning.profiling import main_span, span
from dflash_lightning.transfer import Transfer, make_transfer

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class LoaderConfig:
    """What shapes a rank's sequence of batches.

    Args:
        rank, world_size: rank r takes batches r, r + world_size, ... of the plan.
        node_ranks: the ranks that the same source feeds.
        reuse: steps on one produced batch, each with fresh anchors and noise.
        seed: seed of anchors and noise.
        prefetch: batches that lie ready beside the running step.
    """

    name: str
    rank: int
    world_size: int
    reuse: int
    seed: int
    prefetch: int
    node_ranks: tuple[int, ...] = (0,)

    def rounds(self, num_batches: int) -> int:
        """Produced batches that every rank takes in an epoch; the last may be an empty one."""
        return -(-num_batches // self.world_size)


class HiddenStateLoader:
    """Iterates over one epoch of `HiddenStateBatch`, from the cursor on.

    `iter` has no side effect: work starts with the first `next`. Its length is the whole epoch, also after resume.

    Args:
        source: opens the stream of produced batches.
        plan: epoch -> BatchPlan.
        spec: what the training step needs.
        start: gives the cursor to start from, asked at every `iter`.
        device: where batches go.
    """

    def __init__(
        self,
        source: Source,
        plan: Callable[[int], BatchPlan],
        spec: BatchSpec,
        config: LoaderConfig,
        start: Callable[[], Cursor],
        device: torch.device,
    ) -> None:
        self.source = source
        self.plan = plan
        self.spec = spec
        self.config = config
        self.start = start
        self.device = device
        self._length = config.rounds(len(plan(0))) * config.reuse
        self._running: _LoaderIterator | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[HiddenStateBatch]:
        return _LoaderIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the cursor lives in the data module. Lightning warns of loaders that it takes for not resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        """End the background thread of the iterator in use."""
        if self._running is not None:
            self._running.close()
            self._running = None


class _LoaderIterator(Iterator[HiddenStateBatch]):
    def __init__(self, loader: HiddenStateLoader) -> None:
        self._loader = loader
        self._queue: queue.Queue[HiddenStateBatch | BaseException] = queue.Queue(max(1, loader.config.prefetch))
        # Validation waits for its first batch by design; nothing of it must look like a part of the training step.
        self._timed = loader.config.name == "train"
        self._transfer = make_transfer(loader.device, self._timed)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None
        self._done = False

    def __next__(self) -> HiddenStateBatch:
        if self._done:
            raise StopIteration
        if self._thread is None:
            self._begin()
        with main_span("drafter.queue_wait") if self._timed else nullcontext():
            item = self._wait()
        if isinstance(item, BaseException):
            self._done = True
            raise item
        return self._transfer.hand_over(item)

    def _begin(self) -> None:
        loader, config = self._loader, self._loader.config
        loader.close()
        loader._running = self
        cursor = loader.start()
        plan = loader.plan(cursor.epoch)
        first_round, behind = divmod(cursor.batch, config.world_size)
        assert behind == 0, "cursors stand between rounds"
        numbers = [r * config.world_size + config.rank for r in range(first_round, config.rounds(len(plan)))]
        first = first_round * config.world_size
        node = set(config.node_ranks)
        entries = ((n, plan[n]) for n in range(first, len(plan)) if n % config.world_size in node)
        self._stream = loader.source.open(config.name, entries, [n for n in numbers if n < len(plan)])
        name = f"dflash-loader-{config.name}"
        self._thread = threading.Thread(target=self._run, args=(cursor, numbers, len(plan)), name=name, daemon=True)
        self._thread.start()

    def _wait(self) -> HiddenStateBatch | BaseException:
        assert self._thread is not None
        while True:
            self._loader.source.check()  # a failed producer ends the run now, not when the queue runs dry
            try:
                return self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    return RuntimeError("the loader's thread ended without a batch")

    def _run(self, cursor: Cursor, numbers: list[int], num_batches: int) -> None:
        assert self._stream is not None
        try:
            first_pass = cursor.reuse_pass
            for number in numbers:
                if number < num_batches:
                    produced = self._stream.get()
                    assert produced.number == number
                else:
                    produced = None
                try:
                    tokens = _Tokens.of(produced, self._loader.spec, self._transfer)
                finally:
                    if produced is not None:
                        produced.release()
                for reuse_pass in range(first_pass, self._loader.config.reuse):
                    batch = self._lay_out(tokens, cursor.epoch, number, reuse_pass, num_batches)
                    if not self._put(batch):
                        return
                first_pass = 0
            self._stream.close()
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _lay_out(self, tokens: _Tokens, epoch: int, number: int, reuse_pass: int, num_batches: int) -> HiddenStateBatch:
        config, spec = self._loader.config, self._loader.spec
        seed = step_seed(config.seed, epoch, number, reuse_pass)
        with span("dflash.block_layout") if self._timed else nullcontext():
            layout = draw_layout(
                tokens.input_ids,
                tokens.loss_mask,
                tokens.document_ids,
                tokens.positions,
                block_size=spec.block_size,
                max_anchors=spec.max_anchors,
                seed=seed,
            )
        batch = HiddenStateBatch(
            input_ids=tokens.input_ids,
            hidden_states=tokens.hidden_states,
            last_hidden_state=tokens.last_hidden_state,
            loss_mask=tokens.loss_mask,
            document_ids=tokens.document_ids,
            positions=tokens.positions,
            **layout,
            cursor=self._cursor_after(epoch, number, reuse_pass, num_batches),
            row_ids=tokens.row_ids,
            num_tokens=tokens.num_tokens,
            num_labels=int(layout["label_mask"].sum()),
            step_seed=seed,
        )
        return self._transfer.batch(batch)

    def _cursor_after(self, epoch: int, number: int, reuse_pass: int, num_batches: int) -> Cursor:
        config = self._loader.config
        if reuse_pass + 1 < config.reuse:
            return Cursor(epoch, number - config.rank, reuse_pass + 1)
        following = number - config.rank + config.world_size
        return Cursor(epoch, following, 0) if following < num_batches else Cursor(epoch + 1, 0, 0)

    def _put(self, item: HiddenStateBatch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def close(self) -> None:
        self._done = True
        self._stop.set()
        if self._stream is not None:
            self._stream.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)


@dataclass
class _Tokens:
    """A produced batch out of its slot: its states on the rank's device, its tokens on the host."""

    input_ids: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor | None
    loss_mask: Tensor
    document_ids: Tensor
    positions: Tensor
    row_ids: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(cls, produced: ProducedBatch | None, spec: BatchSpec, transfer: Transfer) -> _Tokens:
        """Copy `produced` out of its slot; None gives one token without supervision: a batch of weight 0.

        The same stands in where the producer had to drop every row.
        """
        if produced is None or not produced.num_tokens:
            zero = torch.zeros(1, dtype=torch.int64)
            hidden = torch.zeros(1, spec.hidden_width)
            last = torch.zeros(1, spec.hidden_width // len(spec.target_layer_ids)) if spec.last_hidden_state else None
            hidden, last = transfer.states(hidden, last)
            return cls(zero, hidden, last, torch.zeros(1, dtype=torch.bool), zero, zero, (), 0)
        views = produced.views
        lengths = np.asarray(produced.lengths)
        document_ids = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        hidden, last = transfer.states(views.hidden_states, views.last_hidden_state)
        return cls(
            input_ids=views.input_ids.long(),
            hidden_states=hidden,
            last_hidden_state=last,
            loss_mask=views.loss_mask.bool(),
            document_ids=torch.from_numpy(document_ids),
            positions=torch.from_numpy(positions),
            row_ids=produced.row_ids,
            num_tokens=produced.num_tokens,
        )


def step_seed(seed: int, epoch: int, number: int, reuse_pass: int) -> int:
    """A 63-bit seed for everything random in one training step."""
    words = np.random.SeedSequence([seed, epoch, number, reuse_pass]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
