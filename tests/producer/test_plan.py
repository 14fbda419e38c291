"""The batch plan: complete, within budget, reproducible, of constant length."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_lightning.producer.plan import BatchPlan, plan_fingerprint


def lengths(count: int = 2000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(4.5, 0.7, count), 2, 500).astype(np.int64)


def test_every_row_once_and_within_the_budget() -> None:
    rows = lengths()
    plan = BatchPlan(rows, token_budget=2048, seed=3, epoch=2)
    batches = [plan[i] for i in range(len(plan))]
    assert sorted(r for b in batches for r in b) == list(range(len(rows)))
    assert all(len(b) * rows[b].max() <= 2048 for b in batches)
    assert plan.padding_waste() < 0.05


def test_same_arguments_same_plan_other_epoch_other_plan() -> None:
    rows = lengths()
    plans = [BatchPlan(rows, token_budget=2048, seed=3, epoch=e) for e in (0, 0, 1)]
    first, again, later = ([p[i] for i in range(len(p))] for p in plans)
    assert first == again
    assert first != later
    assert {frozenset(b) for b in first} != {frozenset(b) for b in later}, "rows meet other rows in another epoch"


@pytest.mark.parametrize("count", [1, 7, 500, 2000])
def test_every_epoch_has_the_same_number_of_batches(count: int) -> None:
    rows = lengths(count)
    assert len({len(BatchPlan(rows, token_budget=700, seed=1, epoch=e)) for e in range(8)}) == 1


def test_rows_of_length_zero_are_left_out() -> None:
    rows = lengths(50)
    rows[[3, 10]] = 0
    plan = BatchPlan(rows, token_budget=600)
    assert sorted(r for i in range(len(plan)) for r in plan[i]) == [r for r in range(50) if r not in (3, 10)]


def test_no_rows_is_an_empty_plan() -> None:
    assert len(BatchPlan(np.zeros(4, np.int64), token_budget=100)) == 0


def test_a_row_over_the_budget_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"token_budget=100.*301"):
        BatchPlan(np.array([5, 301]), token_budget=100)


def test_fingerprint_follows_data_and_settings() -> None:
    rows = lengths(20)
    base = plan_fingerprint("data", rows, token_budget=512, num_buckets=2, seed=0)
    assert base == plan_fingerprint("data", rows.copy(), token_budget=512, num_buckets=2, seed=0)
    others = [
        plan_fingerprint("other", rows, token_budget=512, num_buckets=2, seed=0),
        plan_fingerprint("data", rows + 1, token_budget=512, num_buckets=2, seed=0),
        plan_fingerprint("data", rows, token_budget=513, num_buckets=2, seed=0),
        plan_fingerprint("data", rows, token_budget=512, num_buckets=3, seed=0),
        plan_fingerprint("data", rows, token_budget=512, num_buckets=2, seed=1),
    ]
    assert base not in others
    assert len(set(others)) == 5
