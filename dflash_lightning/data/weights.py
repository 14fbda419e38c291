"""Several files with weights: which file counts how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .readers import resolve_files


class Source(NamedTuple):
    """One input file; each of its records is taken `weight` times."""

    file: Path
    weight: float = 1.0


def resolve_sources(
    paths: str | Path | Sequence[str | Path], weights: Sequence[float] | None = None, option: str = "data.train"
) -> list[Source]:
    """The files behind paths and globs; `weights`: one an entry of `paths`, for each file that it matches.

    Raises ValueError, naming option and value, for a wrong number of weights, one that is not positive and finite, and
    a file that two entries give different weights; else as `resolve_files`.
    """
    entries = [paths] if isinstance(paths, str | Path) else list(paths)
    name = "--weights" if option.startswith("--") else f"{option}_weights"
    if not weights:
        return [Source(file) for file in resolve_files(entries, option)]
    if len(weights) != len(entries):
        raise ValueError(
            f"{name} holds {len(weights)} weights for {len(entries)} entries of {option}; give one for each"
        )
    found: dict[Path, float] = {}
    for entry, weight in zip(entries, weights, strict=True):
        if not math.isfinite(weight) or weight <= 0:
            raise ValueError(f"{name}: {weight} for {str(entry)!r}; give a number above 0 (0.5: half the records)")
        for file in resolve_files([entry], option):
            if found.setdefault(file, weight) != weight:
                raise ValueError(f"{name}: two entries of {option} give {str(file)!r} {found[file]} and {weight}")
    return [Source(file, float(weight)) for file, weight in found.items()]
