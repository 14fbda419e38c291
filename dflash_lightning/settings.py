"""What a run was configured with: kept in its checkpoints, so that a resumed run can follow and name what changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Settings = dict[str, Any]

_TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "max_steps", "max_epochs", "world_size")
_OPTIMIZER, _SCHEDULER = "model.optimizer", "model.scheduler"


def plain(value: Any) -> Any:
    """`value` in types that a checkpoint loads with `weights_only=True`; of functions and objects the name alone."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Tensor | np.generic | np.ndarray):
        return value.tolist()
    for kind in (int, float, str):  # a subclass (np.float64 is one) would not load again
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def trainer_settings(trainer: Any) -> Settings:
    """What of the trainer decides what is learned."""
    return {f"trainer.{name}": plain(getattr(trainer, name)) for name in _TRAINER}


def changes(saved: Settings, now: Settings) -> list[str]:
    """A line for every setting of `saved` that is another one now."""
    return [
        f"{key} is {now.get(key)!r} now; the checkpoint had {value!r}"
        for key, value in saved.items()
        if now.get(key) != value
    ]


class OptimizerSettings:
    """What the optimizer and its scheduler were made with, which their state in a checkpoint would replace.

    Make it before the scheduler is made, and call `add_scheduler` then.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._scheduler: LRScheduler | None = None
        self._places: dict[str, tuple[Any, str]] = {}  # where a setting lives, and its key or attribute there
        self.settings: Settings = {_OPTIMIZER: plain(type(optimizer)), _SCHEDULER: None}
        self._take_groups({"params"})

    def _take_groups(self, skipped: set[str]) -> None:
        """Take what the optimizer's groups hold and has not been taken yet."""
        groups = self._optimizer.param_groups
        for number, group in enumerate(groups):
            prefix = f"{_OPTIMIZER}.group{number}" if len(groups) > 1 else _OPTIMIZER
            for key in sorted(group.keys() - skipped):
                if f"{prefix}.{key}" not in self.settings:
                    self.settings[f"{prefix}.{key}"] = plain(group[key])
                    self._places[f"{prefix}.{key}"] = (number, key)

    def add_scheduler(self, scheduler: LRScheduler) -> None:
        """Take the arguments of `scheduler` and of those inside it, as far as it keeps them."""
        self._scheduler = scheduler
        self.settings[_SCHEDULER] = plain(type(scheduler))
        self._take_groups({"params", "initial_lr"})  # what a scheduler keeps there (OneCycleLR: max_lr)
        for number, part in enumerate(_parts(scheduler)):
            prefix = _SCHEDULER if number == 0 else f"{_SCHEDULER}.{number}"
            for name in inspect.signature(type(part)).parameters.keys() - {"optimizer", "last_epoch"}:
                attribute = next((a for a in (name, f"_{name}") if a in vars(part)), None)
                if attribute is not None and _is_plain(getattr(part, attribute)):
                    self.settings[f"{prefix}.{name}"] = plain(getattr(part, attribute))
                    self._places[f"{prefix}.{name}"] = (part, attribute)

    def check_kind(self, saved: Settings) -> None:
        """Raise ValueError where the checkpoint's optimizer state is another class's."""
        old, new = saved.get(_OPTIMIZER), self.settings[_OPTIMIZER]
        if old not in (None, new):
            raise ValueError(
                f"{_OPTIMIZER} is {new}; the checkpoint holds the state of {old}. Continue with that one, or start a "
                "new run from its weights with model.init_from"
            )

    def reapply(self, saved: Settings) -> None:
        """After a checkpoint's state was loaded: put in again what differs from `saved`, and nothing else."""
        for key, (place, name) in self._places.items():
            if key not in saved or saved[key] == self.settings[key]:
                continue
            if not isinstance(place, int):
                setattr(place, name, self.settings[key])
            elif name == "lr" and self._scheduler is not None:
                self._set_base_rate(place, saved[key], self.settings[key])
            elif isinstance(self._optimizer.param_groups[place][name], Tensor):
                self._optimizer.param_groups[place][name].fill_(self.settings[key])
            else:
                value = self.settings[key]
                self._optimizer.param_groups[place][name] = tuple(value) if isinstance(value, list) else value

    def _set_base_rate(self, number: int, old: float, new: float) -> None:
        """Schedulers set the rate to the base rate times a factor, or multiply it by one: both follow from here."""
        group = self._optimizer.param_groups[number]
        group["lr"] = group["lr"] * (new / old) if old else new
        group["initial_lr"] = new
        assert self._scheduler is not None
        for part in _parts(self._scheduler):
            part.base_lrs[number] = new


def _parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler and those that it runs (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _parts(inner)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
