"""A producer whose target cannot be loaded; named as `kind` in worker processes too."""

from __future__ import annotations

KIND = f"{__name__}:Unloadable"


class Unloadable:
    def __init__(self, config, device) -> None:
        raise RuntimeError("no target may be loaded here")
