"""Which devices producers and trainer may have, and which ranks a node feeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash_lightning import placement


def trainer(device: str = "cuda", ids: tuple[int, ...] = (2, 3), **kwargs) -> SimpleNamespace:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), device_ids=list(ids), **kwargs)


def test_a_device_of_the_trainer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    placement.check_devices([0, 1, "cpu"], trainer())
    with pytest.raises(ValueError, match=r"CUDA device 3 is also in trainer\.devices=\[2, 3\]"):
        placement.check_devices([0, 3], trainer())
    with pytest.raises(ValueError, match=r"CUDA device 4 does not exist \(4 found\)"):
        placement.check_devices([4], trainer())
    with pytest.raises(ValueError, match="'gpu' is neither"):
        placement.check_devices(["gpu"], trainer())
    placement.check_devices([2, 3], trainer("cpu"))


def test_ranks_of_a_node() -> None:
    second_node = trainer(global_rank=5, local_rank=1, world_size=8, num_nodes=2)
    assert placement.node_ranks(second_node) == (4, 5, 6, 7)


def test_cpu_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _pid: set(range(12)))
    assert placement.threads_per_worker(["cpu", "cpu"]) == 4
    assert placement.threads_per_worker([0, 1]) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert placement.threads_per_worker(["cpu"]) is None
