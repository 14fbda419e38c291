"""dflash-lightning: train DFlash drafters for speculative decoding with PyTorch Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_lightning.batch import HiddenStateBatch
    from dflash_lightning.datamodule import HiddenStateDataModule
    from dflash_lightning.drafter.model import DFlashDraftModel
    from dflash_lightning.module import DFlashModule
    from dflash_lightning.profiling import ProfileStats, span

__all__ = ["DFlashDraftModel", "DFlashModule", "HiddenStateBatch", "HiddenStateDataModule", "ProfileStats", "span"]

_HOMES = {
    "DFlashDraftModel": "drafter.model",
    "DFlashModule": "module",
    "HiddenStateBatch": "batch",
    "HiddenStateDataModule": "datamodule",
    "ProfileStats": "profiling",
    "span": "profiling",
}


def __getattr__(name: str) -> Any:
    # On first use: a producer process needs neither Lightning nor the drafter, and starts seconds earlier without them.
    if name in _HOMES:
        return getattr(importlib.import_module(f"dflash_lightning.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dflash_lightning' has no attribute {name!r}")
