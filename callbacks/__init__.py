"""Lightning callbacks of dflash-lightning, imported as `dflash_lightning.callbacks`."""

from dflash_lightning.callbacks.acceptance import AcceptanceCallback
from dflash_lightning.callbacks.checkpoint import AtomicCheckpointIO, DrafterCheckpoint, find_last_checkpoint
from dflash_lightning.callbacks.progress import PipelineProgressBar
from dflash_lightning.callbacks.stage_profiler import StageProfilerCallback

__all__ = [
    "AcceptanceCallback",
    "AtomicCheckpointIO",
    "DrafterCheckpoint",
    "PipelineProgressBar",
    "StageProfilerCallback",
    "find_last_checkpoint",
]
