"""Device times: events are read when they have passed, in order, and kept apart from the wall clock."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.device_times import DeviceTimes, device_times
from dflash_lightning.pipeline.windows import TOP_LEVEL
from dflash_lightning.profiling import ProfileStats


class Device:
    """A device that has worked until `now` (ms) and stamps events with the end of what was queued before them."""

    def __init__(self) -> None:
        self.queued = self.now = 0.0
        self.made = 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self.device.queued

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return end_event.at - self.at


def step(device: Device, times: DeviceTimes) -> None:
    with times.span("drafter.forward"):
        device.queued += 30.0
    begun = times.begin()
    device.queued += 50.0
    times.end("drafter.backward", begun)


def test_only_what_the_device_has_finished_is_read() -> None:
    device, stats = Device(), ProfileStats()
    times = DeviceTimes(device.event, stats)
    step(device, times)
    times.collect()
    assert stats.cumulative() == {}, "nothing is waited for"
    device.now = 40.0
    times.collect()
    assert set(stats.cumulative()) == {"drafter.forward.device"}
    device.now = 80.0
    times.collect()
    totals = stats.cumulative()
    assert totals["drafter.forward.device"].total == pytest.approx(0.030)
    assert totals["drafter.backward.device"].total == pytest.approx(0.050)
    assert not set(totals) & set(TOP_LEVEL), "never added to the wall clock"


def test_events_are_used_again_and_a_stuck_device_does_not_fill_memory() -> None:
    device, stats = Device(), ProfileStats()
    times = DeviceTimes(device.event, stats)
    for _ in range(3000):
        step(device, times)
        device.now = device.queued
    times.collect()
    assert stats.cumulative()["drafter.forward.device"].count == 3000
    assert device.made <= 2 * 1024 + 2
    for _ in range(10_000):  # from here on nothing passes
        step(device, times)
    assert len(times._waiting) <= 8192
    assert device.made <= 2 * 8192 + 2


def test_a_block_that_raises_leaves_no_time() -> None:
    device, stats = Device(), ProfileStats()
    times = DeviceTimes(device.event, stats)
    with pytest.raises(RuntimeError, match="on purpose"), times.span("drafter.forward"):
        raise RuntimeError("on purpose")
    device.now = 1e9
    times.collect()
    assert stats.cumulative() == {}


def test_the_cpu_has_no_clock_of_its_own() -> None:
    times = device_times(torch.device("cpu"))
    assert times.begin() is None
    with times.span("drafter.forward"):
        pass
    times.collect()


@pytest.mark.gpu
def test_cuda_events_time_a_kernel() -> None:
    stats = ProfileStats()
    times = device_times(torch.device("cuda"))
    times._stats = stats
    a = torch.randn(4096, 4096, device="cuda")
    with times.span("drafter.forward"):
        for _ in range(20):
            a = a @ a
    torch.cuda.synchronize()
    times.collect()
    assert stats.cumulative()["drafter.forward.device"].total > 0
