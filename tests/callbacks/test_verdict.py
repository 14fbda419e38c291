"""The verdict, the planner and `dflash profile` on windows made by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_lightning import profile_run
from dflash_lightning.cli import main
from dflash_lightning.pipeline.planner import Measured, Times, measure, predict
from dflash_lightning.pipeline.verdict import judge
from dflash_lightning.pipeline.windows import (
    PROFILE_FILE,
    Settings,
    Window,
    append_window,
    holds_start_up,
    read_windows,
    steady,
)
from dflash_lightning.profiling import ProfileStats, StageTotal

# The reference profile, seconds a batch.
FORWARD, PACK, STEP = 12.1, 1.45, 4.8


def totals(stage_seconds: dict[str, float], count: int) -> dict[str, StageTotal]:
    stats = ProfileStats()
    for stage, seconds in stage_seconds.items():
        for i in range(count):
            stats.add(stage, seconds * (0.95 + 0.1 * (i % 11) / 10))
    return stats.window()


def window(
    producers: int, ranks: int, *, busy: float, wait: float, number: int = 1, steps: int = 40, **options
) -> Window:
    """A window of `steps` lockstep steps in which producers are busy and ranks wait for the given shares."""
    wall = steps * STEP / (1 - wait)
    made = int(busy * wall / FORWARD)
    lanes = {
        f"producer{i}": totals({"target.model_forward": FORWARD, "target.pack_hidden": PACK}, made)
        for i in range(producers)
    }
    # Rank 0 itself never waits: it shows as time in its all-reduce.
    own = {"drafter.queue_wait": 0.001, "drafter.forward": 2.7, "drafter.backward": 2.1 + wall * wait / steps}
    lanes["rank0"] = totals(own, steps)
    options = {"settings": Settings(producers, ranks), **options}
    return Window(
        number, 60.0 * number, wall, steps * (number + 1), lanes, steps * ranks * 500, steps * ranks, 3,
        group_steps=steps, group_wait=wall * wait, group_backward=2.1 * steps, **options,
    )  # fmt: skip


def test_the_reference_run_is_target_bound() -> None:
    share = 1 - STEP / (FORWARD / 5 * 3)
    verdict = judge([window(5, 3, busy=1.0, wait=share)])
    assert verdict.kind == "target-bound"
    assert verdict.target_capacity == pytest.approx(5 * 500 / FORWARD, rel=0.03)
    assert verdict.drafter_capacity == pytest.approx(3 * 500 / STEP, rel=0.03)
    gains = {action.change: action.gain for action in verdict.actions}
    assert gains["one more producer"] == pytest.approx(0.2, abs=0.02)
    assert any(change.startswith("data.reuse 2") and gain > 0.3 for change, gain in gains.items())
    assert any(change.startswith("model.max_anchors") for change in gains)


def test_the_group_counts_where_rank_0_alone_never_waits() -> None:
    slow = window(4, 3, busy=1.0, wait=1 - STEP / (FORWARD / 4 * 3))
    assert slow.lanes["rank0"]["drafter.queue_wait"].total < 0.01 * slow.wall
    assert judge([slow]).kind == "target-bound"


def test_idle_producers_mean_drafter_bound_and_idle_both_transport_bound() -> None:
    verdict = judge([window(5, 1, busy=0.5, wait=0.0)])
    assert verdict.kind == "drafter-bound"
    assert {a.change: a.gain for a in verdict.actions}["one more drafter"] == pytest.approx(1.0, abs=0.1)
    assert judge([window(5, 3, busy=0.4, wait=0.6)]).kind == "transport-bound"
    level = STEP / FORWARD * 5  # ranks that eat what five producers make
    assert level == pytest.approx(2, rel=0.02)
    assert judge([window(5, 2, busy=0.99, wait=0.01)]).kind == "balanced"


def test_warm_up_windows_are_left_out() -> None:
    first = window(5, 1, busy=0.05, wait=0.9, number=0, warm_up=True)
    second = window(5, 1, busy=0.5, wait=0.0)
    assert steady([first, second]) == [second]
    assert judge([first, second]).kind == "drafter-bound"
    assert judge([first]).warm_up, "better than nothing, but said"
    compiled = {"rank0": totals({"drafter.forward": 0.1}, 20) | {}}
    assert holds_start_up(0, 60, compiled)
    assert not holds_start_up(1, 60, compiled)
    spike = compiled["rank0"]["drafter.forward"] + totals({"drafter.forward": 30.0}, 1)["drafter.forward"]
    assert holds_start_up(1, 60, {"rank0": {"drafter.forward": spike}})
    wait, plain = {"drafter.backward": spike}, {"drafter.backward": compiled["rank0"]["drafter.forward"]}
    assert holds_start_up(1, 60, {"rank0": wait, "rank1": wait}), "compiled on every rank"
    assert not holds_start_up(1, 60, {"rank0": plain, "rank1": wait}), "rank 1 waits while rank 0 saves"


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        (Settings(5, 3), 5 / 0.121),
        (Settings(4, 3), 4 / 0.121),
        (Settings(6, 2), 2 / 0.048),
        (Settings(5, 1), 1 / 0.048),
        (Settings(5, 3, min_ready=10), 5 / 0.121),
        (Settings(5, 3, queue_depth=3), None),
        (Settings(5, 3, reuse=2), 3 / 0.048),
        (Settings(0, 1), 1 / (0.121 + 0.015)),
    ],
    ids=str,
)
def test_the_planner_finds_the_slower_side(settings: Settings, rate: float | None) -> None:
    measured = Measured(Times(0.121), Times(0.015), Times(0.0005), Times(0.048), 1.0)
    found = predict(measured, settings)
    if rate is None:  # three slots feed at most three of five workers
        assert found.tokens_per_s < 0.7 * 5 / 0.121
    else:
        assert found.tokens_per_s == pytest.approx(rate, rel=0.02)
    assert 0 <= found.wait_share < 1
    assert 0 < found.target_utilization <= 1


def test_times_keep_the_mean_and_the_spread() -> None:
    import random

    like = totals({"s": 2.0}, 1000)["s"]
    draw = Times(10.0, like).draw(random.Random(0))
    values = [next(draw) for _ in range(5000)]
    assert sum(values) / len(values) == pytest.approx(10.0, rel=0.01)
    assert max(values) == pytest.approx(10.0 * 1.05, rel=0.05)
    assert min(values) == pytest.approx(10.0 * 0.95, rel=0.05)


def test_a_stage_can_be_made_faster_in_the_plan() -> None:
    now = window(5, 3, busy=1.0, wait=1 - STEP / (FORWARD / 5 * 3))
    faster = predict(measure(now, means={"target.model_forward": FORWARD / 2}), now.settings)
    assert faster.tokens_per_s == pytest.approx(3 * 500 / STEP, rel=0.03), "now the drafters are the slower side"
    lighter = measure(now, means={"drafter.backward": 1.1})
    assert lighter.step.mean == pytest.approx(STEP - 1.0, rel=0.02)


def test_profile_prints_table_verdict_and_prediction(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    append_window(tmp_path, window(5, 3, busy=0.1, wait=0.9, number=0, warm_up=True))
    append_window(tmp_path, window(5, 3, busy=1.0, wait=1 - STEP / (FORWARD / 5 * 3)))
    assert main(["profile", str(tmp_path), "--what-if", "target_devices=6", "devices=2"]) == 0
    text = capsys.readouterr().out
    assert "target.model_forward" in text
    assert "target-bound" in text
    assert "with target_devices=6 devices=2" in text
    assert main(["profile", str(tmp_path), "--json", "--what-if", "target_devices=6", "--what-if", "devices=2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"]["kind"] == "target-bound"
    assert shown["what_if"]["settings"]["producers"] == 6
    assert shown["what_if"]["tokens_per_s"] == pytest.approx(2 * 500 / STEP, rel=0.03)
    assert shown["stages"]["target.model_forward"]["p95_ms"] > shown["stages"]["target.model_forward"]["p50_ms"]


def test_a_resumed_run_is_read_from_its_last_start_and_a_cut_line_is_passed_over(tmp_path: Path) -> None:
    first = window(5, 3, busy=1.0, wait=0.1, number=0)
    for item in (first, window(5, 3, busy=1.0, wait=0.1, number=1), first):
        append_window(tmp_path, item)
    with (tmp_path / PROFILE_FILE).open("a") as file:
        file.write('{"number": 1, "sta')
    (read,) = read_windows(tmp_path)
    assert read == first
    assert read.lanes["rank0"]["drafter.forward"].histogram == first.lanes["rank0"]["drafter.forward"].histogram


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("gpus=3", "unknown key"),
        ("devices=many", "give a number"),
        ("devices=0", "1 to 10000"),
        ("target_devices=99999999", "0 to 10000"),
        ("queue_depth=2", "a slot"),
        ("drafter.forward=nan", "finite"),
        ("drafter.forward=inf", "finite"),
        ("drafter.forward=-1", "at least 0"),
        ("drafter.forward=fast", "give a number"),
        ("drafter.queue_wait=0.1", "unknown key"),
        ("dflash.layers=0.1", "unknown key"),
        ("drafter.metrics_sync=0.1", "or a stage: .*drafter.forward"),
    ],
)
def test_what_cannot_be_planned_is_named(pair: str, message: str) -> None:
    stages = {"drafter.forward", "drafter.queue_wait", "dflash.layers"}
    with pytest.raises(ValueError, match=f"(?s)--what-if {pair}|--what-if queue_depth=2") as error:
        profile_run.parse_what_if([pair], Settings(5, 3), stages)
    assert re.search(message, str(error.value))


def changed(item: Window, lane: str, stages: dict[str, StageTotal | None], **options) -> Window:
    """The window with other stages in a lane; None takes one away."""
    inside = {s: t for s, t in {**item.lanes[lane], **stages}.items() if t is not None}
    return replace(item, lanes={**item.lanes, lane: inside}, **options)


def test_a_partly_filled_cache_is_planned_with_what_a_batch_costs() -> None:
    """Half of the batches need no forward: the target side can do twice as much."""
    item = window(5, 3, busy=1.0, wait=0.3)
    made = item.lanes["producer0"]["target.model_forward"].count
    for number in range(5):
        half = totals({"target.model_forward": FORWARD}, made // 2)
        item = changed(item, f"producer{number}", half)
    measured = measure(item)
    assert measured.forward.mean == pytest.approx(FORWARD / 2, rel=0.1)
    assert measure(item, means={"target.model_forward": 2 * FORWARD}).forward.mean == pytest.approx(FORWARD, rel=0.1)
    whole = item
    for number in range(5):
        whole = changed(whole, f"producer{number}", {"target.model_forward": None})
    assert judge([whole]).kind in ("drafter-bound", "transport-bound"), "a full cache runs no target at all"


def test_another_mean_of_a_stage_that_is_not_in_every_step() -> None:
    item = changed(window(5, 1, busy=0.5, wait=0.0), "rank0", totals({"drafter.metrics_sync": 4.0}, 4))
    steps, before = 40, measure(item).step.mean
    after = measure(item, means={"drafter.metrics_sync": 0.0}).step.mean
    assert before - after == pytest.approx(4 * 4.0 / steps, rel=0.06), "by its share of the steps"


def test_pauses_are_no_fault_of_the_transport() -> None:
    plain = window(5, 3, busy=1.0, wait=1 - STEP / (FORWARD / 5 * 3))
    pause = totals({"drafter.validation": 0.3 * plain.wall}, 1)
    paused = changed(plain, "rank0", pause, wall=plain.wall + pause["drafter.validation"].total)
    verdict, found = judge([plain]), judge([paused])
    assert found.kind == verdict.kind == "target-bound"
    assert found.pause_share == pytest.approx(0.23, abs=0.02)
    assert found.drafter_capacity == pytest.approx(verdict.drafter_capacity, rel=0.03)
    assert f"paused {found.pause_share:.0%} of the time" in found.text()
    now = predict(measure(paused), paused.settings)
    assert now.tokens_per_s == pytest.approx(paused.tokens / paused.wall, rel=0.05)


def test_no_advice_costs_throughput() -> None:
    for wait in (0.12, 0.3, 0.6):
        assert all(action.gain >= -0.01 for action in judge([window(5, 3, busy=1.0, wait=wait)]).actions)


def test_a_deep_queue_is_planned_in_seconds() -> None:
    started = time.monotonic()
    predict(measure(window(5, 3, busy=1.0, wait=0.3)), Settings(5, 3, queue_depth=10_000))
    assert time.monotonic() - started < 20


def test_a_run_without_a_verdict_still_shows_its_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    died = replace(window(5, 3, busy=1.0, wait=0.3, number=0), tokens=0, batches=0, closed_by="exception")
    append_window(tmp_path, died)
    assert main(["profile", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "target.model_forward" in text
    assert "no verdict: no window holds" in text
    assert main(["profile", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] is None
    assert "no window holds" in shown["reason"]
    assert main(["profile", str(tmp_path), "--what-if", "devices=2"]) == 2
    assert "--what-if: nothing to predict from" in capsys.readouterr().err


def test_a_run_from_a_full_cache_in_one_process_has_a_verdict() -> None:
    lane = totals({"target.load_batch": 0.1, "target.pack_hidden": 0.2, "drafter.forward": 1.0}, 20)
    assert judge([Window(1, 0.0, 25.0, 20, {"rank0": lane}, 2000, 20)]).kind == "drafter-bound"


@pytest.mark.parametrize("line", ["[]", '{"number": 0, "lanes": {"rank0": {"s": [1]}}, "settings": {}}', "3"])
def test_foreign_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture, line: str) -> None:
    (tmp_path / PROFILE_FILE).write_text(line + "\n")
    assert main(["profile", str(tmp_path)]) == 2
    assert "line 1: no profile window of this version" in capsys.readouterr().err


def test_a_folder_without_a_profile_is_an_error_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["profile", str(tmp_path)]) == 2
    assert "profile_interval" in capsys.readouterr().err


def test_a_window_after_a_cut_line_is_read(tmp_path: Path) -> None:
    append_window(tmp_path, window(5, 3, busy=1.0, wait=0.4, number=1))
    with (tmp_path / PROFILE_FILE).open("a") as file:
        file.write('{"number": 2, "lan')  # killed while it wrote
    append_window(tmp_path, window(5, 3, busy=1.0, wait=0.4, number=0))
    assert [w.number for w in read_windows(tmp_path)] == [0]


def test_a_foreign_profile_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / PROFILE_FILE).write_text('{"number": 0}\n')
    assert main(["profile", str(tmp_path)]) == 2
    assert "profile.jsonl, line 1: no profile window of this version" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    append_window(tmp_path, window(5, 3, busy=1.0, wait=0.4))
    command = [sys.executable, "-u", "-m", "dflash_lightning", "profile", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 141)
