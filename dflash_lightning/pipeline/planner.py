"""The planner: throughput of other settings, by a discrete-event simulation fed with measured stage times.

It follows the pool's own rules: a worker holds two batches, forward and packing overlap, a slot is bound when a batch
is handed out, ranks take batches in plan order and step together. What it does not know: producers and ranks that
share the same cores slow each other down.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_lightning.pipeline.windows import FORWARD_STAGES, PACK_STAGES, PAUSES, TOP_LEVEL, Settings, Window
from dflash_lightning.profiling import StageTotal, bucket_seconds

_BATCHES_PER_WORKER = 2
_LOADER_STAGES = ("dflash.block_layout", "drafter.copy_to_device")
_MOST_STEPS = 5000  # of a simulation: some seconds
# The stages that are causes: another mean of one changes the run. A wait is an effect.
CHANGEABLE = (*FORWARD_STAGES, *PACK_STAGES, *_LOADER_STAGES, *(s for s in TOP_LEVEL if s != "drafter.queue_wait"))


class Times:
    """Draws stage times with the measured distribution's form and the given mean."""

    def __init__(self, mean: float, like: StageTotal | None = None) -> None:
        self.mean = mean
        buckets = sorted(like.histogram.items()) if like is not None else []
        self._values = [bucket_seconds(b) for b, _ in buckets] or [1.0]
        self._weights = [count for _, count in buckets] or [1]
        raw = sum(v * w for v, w in zip(self._values, self._weights, strict=True)) / sum(self._weights)
        self._values = [v * mean / raw for v in self._values]

    def draw(self, rng: random.Random) -> Iterator[float]:
        while True:
            yield from rng.choices(self._values, self._weights, k=256)


@dataclass(frozen=True)
class Measured:
    """Seconds a produced batch (`forward`, `pack`, `load`) and a lockstep step (`step`), and tokens a batch.

    `pause`: seconds a step, on average, in which training stands still for validation and the like.
    """

    forward: Times
    pack: Times
    load: Times
    step: Times
    tokens: float
    pause: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What a simulated run does in its steady state."""

    tokens_per_s: float
    wait_share: float
    target_utilization: float
    step_seconds: float


def measure(window: Window, without: tuple[str, ...] = (), means: dict[str, float] | None = None) -> Measured:
    """The planner's input from a (combined) window.

    Args:
        without: stages of the main thread to leave out of the step, as if they were deferred.
        means: stage of `CHANGEABLE` -> another mean of its spans, in seconds.
    """
    totals = {stage: item for stage, (item, _) in window.merged().items()}
    means = means or {}
    settings = window.settings
    # Every produced batch is packed, also one that comes from the cache without the target's forward.
    packed = totals.get("target.pack_hidden")
    produced = max(1, packed.count if packed else window.batches // settings.reuse)
    rank_lanes = sum(name.startswith("rank") for name in window.lanes)
    loaded = max(1, window.batches * max(1, rank_lanes) // settings.ranks)  # by the ranks whose spans are here

    def a_batch(stages: tuple[str, ...], count: int) -> float:
        return sum(means.get(s, totals[s].mean) * totals[s].count / count for s in stages if s in totals)

    steps = max(1, window.batches // settings.ranks)
    step = max(1e-6, window.wall * (1 - window.wait_share()) - window.pauses()) / steps
    pause = window.pauses() / steps
    rank0 = window.lanes.get("rank0", {})
    for stage in without:
        if stage in rank0:
            step -= rank0[stage].total / steps
    for stage, mean in means.items():
        if stage not in TOP_LEVEL or stage not in rank0:
            continue
        old = rank0[stage].mean
        if stage == "drafter.backward" and window.group_steps:
            old = window.group_backward / window.group_steps  # without the wait for slower ranks
        more = (mean - old) * rank0[stage].count / steps
        if stage in PAUSES:
            pause += more
        else:
            step += more
    return Measured(
        forward=Times(a_batch(FORWARD_STAGES, produced), totals.get("target.model_forward")),
        pack=Times(a_batch(PACK_STAGES, produced), totals.get("target.pack_hidden")),
        load=Times(a_batch(_LOADER_STAGES, loaded)),
        step=Times(max(step, 1e-6), rank0.get("drafter.forward")),
        tokens=window.tokens / max(1, window.batches),
        pause=max(0.0, pause),
    )


def predict(measured: Measured, settings: Settings, steps: int | None = None, seed: int = 0) -> Prediction:
    """Simulate `steps` lockstep steps; the first quarter, in which the queue fills, is left out."""
    if steps is None:
        steps = min(_MOST_STEPS, max(400, 8 * settings.queue_depth // settings.ranks))
    return _Simulation(measured, settings, seed).run(steps)


class _Worker:
    def __init__(self) -> None:
        self.held = 0
        self.put = self.pack_start = self.pack_end = 0.0  # of the newest batch


class _Rank:
    def __init__(self, number: int) -> None:
        self.wanted = number
        self.loading = False
        self.unput = 0  # laid-out batches that wait for room in the prefetch queue
        self.queue = 0
        self.popped: float | None = None  # when it got the batch of the coming step


class _Simulation:
    def __init__(self, measured: Measured, settings: Settings, seed: int) -> None:
        rng = random.Random(seed)
        self.settings = settings
        self.tokens, self.pause = measured.tokens, measured.pause
        self.forward, self.pack = measured.forward.draw(rng), measured.pack.draw(rng)
        self.load, self.step = measured.load.draw(rng), measured.step.draw(rng)
        self.now = 0.0
        self.events: list[tuple[float, int, str, int, int]] = []
        self.order = itertools.count()
        self.workers = [_Worker() for _ in range(settings.producers)]
        self.ranks = [_Rank(r) for r in range(settings.ranks)]
        self.free_slots = settings.queue_depth
        self.next_batch = 0
        self.ready: set[int] = set()
        self.stepping = False
        self.forward_busy: deque[tuple[float, float]] = deque()

    def at(self, when: float, what: str, who: int, batch: int = 0) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, who, batch))

    def run(self, steps: int) -> Prediction:
        begun, waited, idle_since = 0, 0.0, 0.0
        start_at, first = 0.0, steps // 4
        while True:
            self.settle()
            if not self.stepping and all(r.popped is not None for r in self.ranks):
                if begun == first:
                    start_at, waited = idle_since, 0.0
                waited += self.now - idle_since
                begun += 1
                self.stepping = True
                self.at(self.now + next(self.step), "step", 0)
                continue
            assert self.events, "a simulated pipeline cannot stand still"
            self.now, _, what, who, batch = heapq.heappop(self.events)
            if what == "made":
                self.workers[who].held -= 1
                self.ready.add(batch)
            elif what == "loaded":
                rank = self.ranks[who]
                rank.loading = False
                rank.unput = self.settings.reuse
                self.free_slots += 1
            elif what == "step":
                self.stepping, idle_since = False, self.now
                for rank in self.ranks:
                    rank.popped = None
                if begun == steps:
                    return self.result(steps - first, self.now - start_at, waited, start_at)

    def settle(self) -> None:
        """Everything that can happen now without time passing."""
        for rank in self.ranks:
            moved = True
            while moved:
                moved = False
                if rank.popped is None and rank.queue:
                    rank.queue -= 1
                    rank.popped = self.now
                    moved = True
                if rank.unput and rank.queue < self.settings.prefetch:
                    rank.unput -= 1
                    rank.queue += 1
                    moved = True
        self.hand_out()
        for index, rank in enumerate(self.ranks):
            if not rank.loading and not rank.unput and self.may_take(rank.wanted):
                rank.loading = True
                made_here = next(self.forward) + next(self.pack) if not self.workers else 0.0
                if not self.workers:
                    self.forward_busy.append((self.now, made_here))
                self.ready.discard(rank.wanted)
                rank.wanted += len(self.ranks)
                self.at(self.now + made_here + next(self.load), "loaded", index)

    def may_take(self, number: int) -> bool:
        if not self.workers:
            return True
        gate = min(self.settings.min_ready, self.settings.queue_depth)
        return number in self.ready and len(self.ready) >= gate

    def hand_out(self) -> None:
        while self.free_slots and self.workers:
            worker = min(self.workers, key=lambda w: w.held)
            if worker.held >= _BATCHES_PER_WORKER:
                return
            self.free_slots -= 1
            worker.held += 1
            started = max(self.now, worker.put)
            spent = next(self.forward)
            self.forward_busy.append((started, spent))
            # One made batch may wait beside the one being packed.
            worker.put = max(started + spent, worker.pack_start)
            worker.pack_start = max(worker.put, worker.pack_end)
            worker.pack_end = worker.pack_start + next(self.pack)
            self.at(worker.pack_end, "made", self.workers.index(worker), self.next_batch)
            self.next_batch += 1

    def result(self, steps: int, wall: float, waited: float, start: float) -> Prediction:
        busy = sum(spent for begun, spent in self.forward_busy if begun >= start)
        ranks = len(self.ranks)
        wall += steps * self.pause
        return Prediction(
            tokens_per_s=steps * ranks * self.tokens / wall,
            wait_share=waited / wall,
            target_utilization=min(1.0, busy / (wall * (len(self.workers) or ranks))),
            step_seconds=wall / steps,
        )
