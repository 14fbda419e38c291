"""`dflash prepare` as a command: options, report, picture, ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dflash_lightning import prepare
from dflash_lightning.cli import main
from dflash_lightning.data import load_rows
from dflash_lightning.producer.plan import BatchPlan
from dflash_lightning.row_figures import figures_text, row_figures


def run(target: str, data: list[str], out: Path, *more: str) -> int:
    return main(["prepare", "--target", target, "--data", *data, "--out", str(out), "--max-seq-len", "64", *more])


def test_report_terminal_and_picture_show_the_plan(tiny_target: str, write_chats, tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows"
    assert run(tiny_target, [write_chats(80)], out, "--token-budget", "256", "--num-buckets", "3") == 0
    report = json.loads((out / "report.json").read_text())
    lengths = np.array([len(ids) for ids in load_rows(out)["input_ids"]])
    plan = BatchPlan(lengths, token_budget=256, num_buckets=3)
    assert report["plan"] == {
        "token_budget": 256, "num_buckets": 3, "batches": len(plan), "padding": round(plan.padding_waste(), 5),
    }  # fmt: skip
    assert sum(bucket["rows"] for bucket in report["buckets"]) == sum(report["histogram"]["rows"]) == 80
    assert sum(bucket["tokens"] for bucket in report["buckets"]) == sum(report["histogram"]["tokens"]) == lengths.sum()
    assert sum(report["histogram"]["supervised_tokens"]) == report["supervised_tokens"]
    assert sum(report["supervised_shares"]["rows"]) == 80
    shown = capsys.readouterr().out
    assert f"{len(plan):,} batches of at most 256 tokens, {plan.padding_waste():.1%} padding" in shown
    assert f"{report['buckets'][0]['shortest']} - {report['buckets'][0]['longest']}" in shown
    picture = np.asarray(Image.open(out / "report.png").convert("RGB"))
    assert picture.shape[1] == 1200
    colours = {tuple(colour) for colour in picture.reshape(-1, 3)[::7].tolist()}
    assert {(31, 119, 180), (158, 193, 226), (231, 163, 145)} <= colours


def test_bad_cache_options_are_refused_before_the_rows_are_made(
    tiny_target: str, write_chats, tmp_path: Path, capsys
) -> None:
    assert run(tiny_target, [write_chats(8)], tmp_path / "rows", "--hidden-states") != 0
    assert "--hidden-states needs --cache-dir" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_buckets_are_those_of_the_plan() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 3000), 4, 2000).astype(int)
    figures = row_figures(lengths, lengths // 2, token_budget=4096, num_buckets=4)
    plan = BatchPlan(lengths, token_budget=4096, num_buckets=4)
    padded = {}
    for number in range(len(plan)):
        rows = lengths[plan[number]]
        owner = next(
            i for i, b in enumerate(figures["buckets"]) if b["shortest"] <= rows.min() and rows.max() <= b["longest"]
        )
        padded[owner] = padded.get(owner, 0) + len(rows) * rows.max()
    for number, bucket in enumerate(figures["buckets"]):
        # Windows of a bucket are shuffled with another seed here: nearly the same batches.
        assert bucket["padding"] == pytest.approx(1 - bucket["tokens"] / padded[number], abs=0.03)


@pytest.mark.parametrize("lengths", [[7], [3, 3, 4], [5] * 10, list(range(2, 300))])
def test_figures_of_odd_sets(lengths: list[int], tmp_path: Path) -> None:
    from dflash_lightning.data.report import PrepareReport
    from dflash_lightning.row_figures import write_picture

    array = np.array(lengths)
    report = PrepareReport(path="", options={}, rows=len(lengths))
    report.finish(array, np.full(len(array), 2), 9, "hash")
    report.extra = row_figures(array, np.full(len(array), 2), token_budget=300, num_buckets=6)
    values = report.as_dict()
    assert sum(values["histogram"]["rows"]) == len(lengths)
    assert f"{len(lengths):,} rows" in figures_text(values)
    write_picture(tmp_path / "a.png", values)
    assert Image.open(tmp_path / "a.png").size[0] == 1200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--token-budget", "32"], "--token-budget=32 is smaller than --max-seq-len=64"),
        (["--num-buckets", "0"], "--num-buckets=0: at least 1"),
        (["--weights", "1", "2"], "--weights holds 2 weights for 1 entries of --data"),
        (["--weights", "0"], "--weights: 0.0 for"),
        (["--workers", "0"], "workers is 0; it must be at least 1"),
    ],
)
def test_bad_options_are_named_before_any_work(
    options, message, tiny_target: str, write_chats, tmp_path, capsys
) -> None:
    assert run(tiny_target, [write_chats(3)], tmp_path / "rows", *options) == 2
    assert message in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["chats.jsonl"]


def test_weights_reach_the_rows_and_the_report(tiny_target: str, write_chats, tmp_path: Path, capsys) -> None:
    files = [write_chats(10, "a.jsonl"), write_chats(10, "b.jsonl", offset=50)]
    assert run(tiny_target, files, tmp_path / "rows", "--weights", "1", "2.5") == 0
    report = json.loads((tmp_path / "rows" / "report.json").read_text())
    assert [file["weight"] for file in report["files"]] == [1.0, 2.5]
    assert 30 <= report["rows"] < 40
    assert "b.jsonl: weight 2.5, 10 records taken as" in capsys.readouterr().out


def test_ctrl_c_says_what_to_do(tiny_target: str, write_chats, tmp_path: Path, capsys, monkeypatch) -> None:
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare_rows", stopped)
    assert run(tiny_target, [write_chats(3)], tmp_path / "rows") == 130
    assert "stopped; the same command goes on where this one was" in capsys.readouterr().err


def test_hidden_states_are_asked_for_when_the_rows_are_there(
    tiny_target: str, write_chats, tmp_path, monkeypatch
) -> None:
    seen = []
    monkeypatch.setattr(prepare.fill_cache, "run", lambda args, rows: seen.append(len(load_rows(rows))))
    assert run(tiny_target, [write_chats(3)], tmp_path / "rows") == 0
    assert seen == []
    assert run(tiny_target, [write_chats(3)], tmp_path / "rows", "--hidden-states", "--cache-dir", "x") == 0
    assert seen == [3]
