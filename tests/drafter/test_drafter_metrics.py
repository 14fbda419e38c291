"""Counters of the training step."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.drafter.metrics import DrafterMetrics, accepted_lengths


def bools(rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_a10_acceptance_stops_at_the_first_miss_and_at_a_masked_slot():
    every = bools([[0, 1, 1, 1, 1]])
    for slot_zero in (0, 1):  # what stands in slot 0 never counts
        assert accepted_lengths(bools([[slot_zero, 1, 0, 1, 1]]), every).tolist() == [2]
        assert accepted_lengths(bools([[slot_zero, 0, 1, 1, 1]]), every).tolist() == [1]
    assert accepted_lengths(bools([[0, 1, 1, 1, 1]]), bools([[0, 1, 0, 1, 1]])).tolist() == [2]
    assert accepted_lengths(bools([[0, 1, 1, 1, 1]]), every).tolist() == [5]


def test_compute_pools_everything_since_the_reset():
    metrics = DrafterMetrics(3)
    metrics.update(torch.tensor(4.0), torch.tensor(1.0), bools([[0, 1, 1], [0, 0, 1]]), bools([[0, 1, 1], [0, 1, 1]]))
    # The second block has no label: it is padding, and not a block of acceptance length 1.
    metrics.update(torch.tensor(2.0), torch.tensor(2.0), bools([[0, 1, 0], [0, 0, 0]]), bools([[0, 1, 0], [0, 0, 0]]))
    values = metrics.compute()
    assert values["loss"].item() == pytest.approx(2.0)
    assert values["accuracy"].item() == pytest.approx(4 / 5)
    assert values["acceptance_length"].item() == pytest.approx((3 + 1 + 2) / 3)
    assert values["accuracy_slots"].tolist() == pytest.approx([0, 2 / 3, 1])
    metrics.reset()
    assert metrics.sums.count_nonzero() == 0


def test_nothing_counted_gives_zeros():
    metrics = DrafterMetrics(3)
    nothing = bools([[0, 0, 0]])
    metrics.update(torch.zeros(()), torch.zeros(()), nothing, nothing)
    values = metrics.compute()
    assert [values[name].item() for name in ("loss", "accuracy", "acceptance_length")] == [0, 0, 0]
    assert values["accuracy_slots"].tolist() == [0, 0, 0]


def test_counts_stay_exact_in_a_half_precision_module():
    metrics = torch.nn.ModuleList([DrafterMetrics(2)]).to(torch.bfloat16)[0]
    assert isinstance(metrics, DrafterMetrics)
    mask = bools([[0, 1]] * 300)
    for _ in range(4):
        metrics.update(torch.tensor(1.0), torch.tensor(1.0), mask, mask)
    assert metrics.sums.dtype == torch.float64
    assert metrics.sums[3].item() == 1200
    metrics.reset()
    assert metrics.sums.dtype == torch.float64
