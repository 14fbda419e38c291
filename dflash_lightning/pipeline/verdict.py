"""The verdict: which side holds the run back, what both could do, and what to change next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_lightning.pipeline.planner import Measured, Times, measure, predict
from dflash_lightning.pipeline.windows import Settings, Window, combine, steady

# Capacities closer than this are level; a run slower than this share of both is held back between them.
_LEVEL = 0.07
_REACHED = 0.85
_WORTH_SAYING = 0.01


@dataclass(frozen=True)
class Action:
    """A change and the throughput that the planner predicts for it, relative to now (0.1 = a tenth more)."""

    change: str
    gain: float


@dataclass(frozen=True)
class Verdict:
    """`kind`: target-bound, drafter-bound, transport-bound or balanced. Rates in tokens/s."""

    kind: str
    tokens_per_s: float
    target_capacity: float
    drafter_capacity: float
    target_utilization: float
    drafter_wait_share: float
    pause_share: float
    actions: tuple[Action, ...]
    warm_up: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        reasons = {
            "target-bound": "the drafters wait for hidden states",
            "drafter-bound": "the producers wait for room in the queue",
            "transport-bound": "both sides wait: batches are held back between them",
            "balanced": "both sides are about equally fast",
        }
        busy, wait = f"{self.target_utilization:.0%}", f"{self.drafter_wait_share:.0%}"
        lines = [
            f"{self.kind}: {reasons[self.kind]}",
            f"  throughput        {self.tokens_per_s:>12,.0f} tokens/s",
            f"  target capacity   {self.target_capacity:>12,.0f} tokens/s (producers busy {busy})",
            f"  drafter capacity  {self.drafter_capacity:>12,.0f} tokens/s (drafters wait {wait})",
        ]
        if self.pause_share > _WORTH_SAYING:
            lines.append(f"  paused {self.pause_share:.0%} of the time: validation, checkpoints, measured acceptance")
        if self.actions:
            lines.append("next, with the throughput predicted for each:")
            lines += [f"  {action.gain:>+6.1%}  {action.change}" for action in self.actions]
        if self.warm_up:
            lines.append("only windows with start-up or compilation so far: read this with care")
        return "\n".join(lines)


def judge(windows: Sequence[Window]) -> Verdict:
    """The verdict over the steady windows of a run.

    Raises:
        ValueError: no batch was trained in them, or no target stage was seen.
    """
    window = combine(steady(windows))
    if not window.batches or not window.producers():
        raise ValueError("no window holds both a training step and a produced batch")
    if not window.tokens:
        raise ValueError("no token has been trained")
    measured = measure(window)
    target, drafter = capacities(measured, window.settings)
    # Capacities are those of running training; a pause is no fault of either side.
    rate = window.tokens / max(1e-9, window.wall - window.pauses())
    if rate < _REACHED * min(target, drafter):
        kind = "transport-bound"
    elif abs(target - drafter) <= _LEVEL * max(target, drafter):
        kind = "balanced"
    else:
        kind = "target-bound" if target < drafter else "drafter-bound"
    return Verdict(
        kind=kind,
        tokens_per_s=window.tokens / window.wall,
        target_capacity=target,
        drafter_capacity=drafter,
        target_utilization=window.target_utilization() or 0.0,
        drafter_wait_share=window.wait_share(),
        pause_share=min(1.0, window.pauses() / window.wall),
        actions=_actions(window, measured),
        warm_up=window.warm_up,
    )


def capacities(measured: Measured, settings: Settings) -> tuple[float, float]:
    """Tokens/s (trained) that the target side and the drafter side could do if the other were never slow."""
    forward, pack = measured.forward.mean, measured.pack.mean
    a_batch = max(forward, pack) if settings.producers else forward + pack
    target = (settings.producers or settings.ranks) * measured.tokens * settings.reuse / max(a_batch, 1e-9)
    return target, settings.ranks * measured.tokens / measured.step.mean


def _actions(window: Window, measured: Measured) -> tuple[Action, ...]:
    now = window.settings
    options: list[tuple[str, Measured, Settings]] = []
    if now.producers:
        options.append(("one more producer", measured, replace(now, producers=now.producers + 1)))
        options.append(("one more drafter", measured, replace(now, ranks=now.ranks + 1)))
        if now.ranks > 1:
            moved = replace(now, producers=now.producers + 1, ranks=now.ranks - 1)
            options.append(
                (f"a drafter's device to the targets ({moved.producers} and {moved.ranks})", measured, moved)
            )
        if now.producers > 1:
            moved = replace(now, producers=now.producers - 1, ranks=now.ranks + 1)
            options.append(
                (f"a target's device to the drafters ({moved.producers} and {moved.ranks})", measured, moved)
            )
        if now.min_ready > 1:
            options.append(("data.min_ready 1", measured, replace(now, min_ready=1)))
        deeper = replace(now, queue_depth=2 * now.queue_depth)
        options.append((f"data.queue_depth {deeper.queue_depth}", measured, deeper))
    options.append(
        (f"data.reuse {now.reuse + 1}: more steps on each batch", measured, replace(now, reuse=now.reuse + 1))
    )
    syncs = measure(window, without=("drafter.grad_norm_sync", "drafter.metrics_sync"))
    options.append(("metrics read less often (trainer.log_every_n_steps)", syncs, now))
    before = predict(measured, now).tokens_per_s
    found = [Action(change, predict(m, s).tokens_per_s / before - 1) for change, m, s in options]
    # More anchors cost drafter time, which is free while the drafters wait.
    spare = measured.step.mean * window.wait_share() / max(1e-9, 1 - window.wait_share())
    kept = [a for a in found if a.gain > _WORTH_SAYING]
    for part in (0.9, 0.7, 0.5, 0.3) if window.wait_share() > 0.1 else ():
        longer = Times(measured.step.mean + part * spare)
        gain = predict(replace(measured, step=longer), now).tokens_per_s / before - 1
        if gain >= -_WORTH_SAYING:
            factor = longer.mean / measured.step.mean
            kept.append(Action(f"model.max_anchors up to {factor:.1f}x: more supervision a batch", gain))
            break
    return tuple(sorted(kept, key=lambda a: -a.gain))
