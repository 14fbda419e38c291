"""Who runs where: checks of the devices, the ranks of a node, and the pool that local rank 0 shares with the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from dflash_lightning.producer.pool import ProducerPool
from dflash_lightning.producer.ranks import RankSource
from dflash_lightning.producer.source import Source


def check_devices(target_devices: Sequence[int | str], trainer: Trainer) -> None:
    """Raise ValueError for a target device that does not exist or that the trainer uses itself."""
    available = torch.cuda.device_count()
    on_cuda = trainer.strategy.root_device.type == "cuda"
    own = set(trainer.device_ids) if on_cuda else set()
    for device in target_devices:
        if device == "cpu":
            continue
        if not isinstance(device, int):
            raise ValueError(f"data.target_devices: {device!r} is neither a CUDA index nor 'cpu'")
        if not 0 <= device < available:
            raise ValueError(f"data.target_devices: CUDA device {device} does not exist ({available} found)")
        if device in own:
            raise ValueError(
                f"data.target_devices: CUDA device {device} is also in trainer.devices={sorted(own)}; "
                "a producer and the trainer must not share a device"
            )


def threads_per_worker(devices: Sequence[int | str]) -> int | None:
    """Compute threads of a CPU worker: an equal share of the cores, the trainer's share included.

    None leaves them alone: there is no CPU worker, or OMP_NUM_THREADS says how many threads every process takes.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    on_cpu = sum(d == "cpu" for d in devices)
    return max(1, len(os.sched_getaffinity(0)) // (on_cpu + 1)) if on_cpu else None


def node_ranks(trainer: Trainer) -> tuple[int, ...]:
    """Global ranks of this node, local rank 0 first."""
    first = trainer.global_rank - trainer.local_rank
    return tuple(range(first, first + trainer.world_size // trainer.num_nodes))


def share_pool(trainer: Trainer, start: Callable[[], ProducerPool]) -> Source:
    """Start the node's pool in local rank 0 and connect the other ranks to it.

    Runs on every rank. Raises on every rank when one node's pool cannot start, so that none waits for the others.
    """
    if trainer.world_size == 1:
        return start()
    pool, said, failure = None, None, None
    if trainer.local_rank == 0:
        try:
            pool = start()
            said = ("pool", pool.server.path if pool.server is not None else "")
        except Exception as error:
            said = ("error", f"{type(error).__name__}: {error}")
            failure = error
    heard: list[tuple[str, str] | None] = [None] * trainer.world_size
    dist.all_gather_object(heard, said)
    errors = [entry[1] for entry in heard if entry is not None and entry[0] == "error"]
    if errors:
        if pool is not None:
            pool.close()
        if failure is not None:
            raise failure
        raise RuntimeError(f"another rank could not start its producers: {errors[0]}")
    if pool is not None:
        return pool
    mine = heard[node_ranks(trainer)[0]]
    assert mine is not None
    return RankSource(mine[1], trainer.global_rank)
