"""Lightning callbacks of dflash-lightning, imported as `dflash_lightning.callbacks`."""

from dflash_lightning.callbacks.checkpoint import AtomicCheckpointIO, DrafterCheckpoint, find_last_checkpoint
from dflash_lightning.callbacks.progress import PipelineProgressBar
from dflash_lightning.callbacks.stage_profiler import StageProfilerCallback

__all__ = [
    "AtomicCheckpointIO",
    "DrafterCheckpoint",
    "PipelineProgressBar",
    "StageProfilerCallback",
    "find_last_checkpoint",
]
