"""Wait and backward time of every step over all ranks of a lockstep group, brought together without a collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

from dflash_lightning.pipeline.windows import TOP_LEVEL
from dflash_lightning.profiling import Event, process_stats

_STEPS_KEPT = 10_000
_TOP_LEVEL = frozenset(TOP_LEVEL)
# A top-level span -> what the main thread's time right before it is.
_GAPS = {
    "drafter.forward": "drafter.batch_start",
    "drafter.backward": "drafter.in_step",
    "drafter.optimizer_step": "drafter.in_step",
    "drafter.queue_wait": "drafter.between_steps",
    "drafter.checkpoint": "drafter.between_steps",
    "drafter.metrics_sync": "drafter.between_steps",
    "drafter.acceptance": "drafter.between_steps",
}


class OwnSteps:
    """Wait and backward time of this rank's batches, read from its own main thread's spans."""

    def __init__(self) -> None:
        self._batch = 0
        self._steps: deque[list[float]] = deque(maxlen=_STEPS_KEPT)
        self.forget()

    def forget(self) -> None:
        """Spans until now belong to no batch (validation, start-up)."""
        process_stats().take_own(_TOP_LEVEL)
        self._last_end = perf_counter()

    def pause(self) -> None:
        """What is no step begins now (validation): the time since the last span is one between steps."""
        self._with_gaps()
        now = perf_counter()
        process_stats().record("drafter.between_steps", now - self._last_end, now)
        self.forget()

    def _with_gaps(self) -> list[Event]:
        """The top-level spans since the last batch.

        Gaps before, inside and between two steps become spans too: they are Lightning's loop, the callbacks and the
        logger.
        """
        events = process_stats().take_own(_TOP_LEVEL)
        for stage, seconds, end in events:
            gap = _GAPS.get(stage)
            if gap is not None and end - seconds > self._last_end:
                process_stats().record(gap, end - seconds - self._last_end, end - seconds)
            self._last_end = end
        process_stats().take_own(_TOP_LEVEL)  # the gaps themselves are not the next batch's
        return events

    def end_batch(self) -> None:
        """A batch has ended: its spans are those since the last one."""
        events = self._with_gaps()
        wait = sum(seconds for stage, seconds, _ in events if stage == "drafter.queue_wait")
        backward = sum(seconds for stage, seconds, _ in events if stage == "drafter.backward")
        self._steps.append([self._batch, wait, backward])
        self._batch += 1

    def take(self) -> list[list[float]]:
        """[batch, wait, backward] of every batch since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


class GroupSteps:
    """Joins the ranks' steps: the group waits as long as its slowest rank, its own backward time is the shortest."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = len(ranks)
        self._seen: dict[int, list[tuple[float, float]]] = {}

    def add(self, steps: Sequence[Sequence[float]]) -> None:
        """One rank's new steps."""
        for batch, wait, backward in steps:
            self._seen.setdefault(int(batch), []).append((wait, backward))

    def take(self) -> tuple[int, float, float]:
        """Steps that all ranks have reported, their waits and their backward times together."""
        whole = [batch for batch, times in self._seen.items() if len(times) == self._ranks]
        found = [self._seen.pop(batch) for batch in whole]
        # Ranks that never report must not make this grow.
        for batch in sorted(self._seen)[:-_STEPS_KEPT]:
            del self._seen[batch]
        return len(found), sum(max(w for w, _ in t) for t in found), sum(min(b for _, b in t) for t in found)
