"""The batch plan: complete, within budget, reproducible, of constant length."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_lightning.producer.plan import BatchPlan, plan_fingerprint


def lengths(count: int = 2000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(4.5, 0.7, count), 2, 500).astype(np.int64)


def batches(plan: BatchPlan) -> list[list[int]]:
    return [plan[i] for i in range(len(plan))]


def test_every_row_once_and_within_the_budget() -> None:
    rows = lengths()
    plan = BatchPlan(rows, token_budget=2048, seed=3, epoch=2)
    assert sorted(r for b in batches(plan) for r in b) == list(range(len(rows)))
    assert all(len(b) * rows[b].max() <= 2048 for b in batches(plan))
    assert plan.padding_waste() < 0.05


def test_same_arguments_same_plan_other_seed_other_batches() -> None:
    rows = lengths()
    first, again, other = (batches(BatchPlan(rows, token_budget=2048, seed=s, epoch=1)) for s in (3, 3, 4))
    assert first == again
    assert {tuple(b) for b in first} != {tuple(b) for b in other}


def test_an_epoch_changes_the_order_of_the_batches_and_nothing_in_them() -> None:
    rows = lengths()
    first, later, third = (batches(BatchPlan(rows, token_budget=2048, seed=3, epoch=e)) for e in (0, 1, 2))
    assert first != later != third
    assert sorted(first) == sorted(later) == sorted(third), "the same rows in the same order: padding and all"


def test_without_shuffling_batches_follow_length() -> None:
    rows = lengths()
    plan = BatchPlan(rows, token_budget=2048, num_buckets=3, shuffle=False, seed=1, epoch=5)
    assert batches(plan) == batches(BatchPlan(rows, token_budget=2048, num_buckets=3, shuffle=False))
    tokens = [rows[b] for b in batches(plan)]
    assert all((np.diff(t) <= 0).all() for t in tokens), "longest first"
    thirds = [np.concatenate(part) for part in np.array_split(np.array(tokens, dtype=object), 3)]
    assert thirds[0].mean() < thirds[1].mean() < thirds[2].mean()


def test_little_is_padding_at_the_size_of_a_real_run() -> None:
    rng = np.random.default_rng(0)
    rows = np.clip(rng.lognormal(np.log(2200) - 0.7**2 / 2, 0.7, 100_000), 2, 8192).astype(np.int64)
    assert BatchPlan(rows, token_budget=49152, num_buckets=6).padding_waste() < 0.02


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
