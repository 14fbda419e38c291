"""`dflash` as a user types it: runs, resume, and clear errors for bad input."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from .conftest import read_scalars


@pytest.fixture
def write_config(tiny_target: str, tmp_path: Path) -> Callable[..., Path]:
    """Write a small run's YAML; keyword arguments replace values, `section__key`."""

    def write(train: str, **changes) -> Path:
        config = {
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "default_root_dir": str(tmp_path / "run"),
                "max_steps": 6,
                "log_every_n_steps": 1,
                "enable_progress_bar": False,
            },
            "data": {"target": tiny_target, "train": train, "token_budget": 256, "max_seq_len": 128, "num_buckets": 2},
            "model": {"num_layers": 2, "block_size": 4, "max_anchors": 16},
            "checkpoint": {"every_n_train_steps": 2},
        }
        for key, value in changes.items():
            section, name = key.split("__")
            config[section][name] = value
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    return write


def dflash(*args: object) -> SimpleNamespace:
    """Run a command in this process: starting another takes longer than a small run does."""
    from dflash_lightning.cli import main

    argv, out, err = sys.argv, io.StringIO(), io.StringIO()
    logging.raiseExceptions = False  # handlers may hold the captured stderr of an earlier test
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(a) for a in args])
    finally:
        sys.argv, logging.raiseExceptions = argv, True
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def start(*args: object, **kwargs) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dflash_lightning", *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **kwargs
    )


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, zombies left out."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, tail = stat.read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = tail.split()[:2]
        if state != "Z":
            parents[int(head.split("(")[0])] = int(parent)
    found: set[int] = set()
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def steps_saved(run: Path) -> int:
    return max((int(f.stem.split("=")[1]) for f in (run / "checkpoints").glob("step=*.ckpt")), default=0)


def test_e09_fit_validate_resume_generate(
    write_config, write_chats: Callable[..., str], tmp_path: Path, tiny_target: str
) -> None:
    config = write_config(
        write_chats(40), data__val=write_chats(8, "val.jsonl", offset=90), data__target_devices=["cpu"]
    )
    fit = start("fit", "--config", config)
    output = fit.communicate(timeout=150)[0]
    assert fit.returncode == 0, output
    run = tmp_path / "run"
    assert (run / "config.yaml").is_file()
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert len(read_scalars(run)["train/loss"]) == 6

    validate = dflash("validate", "--config", config, "--ckpt_path", "last")
    assert validate.returncode == 0, validate.stderr
    assert "val/acceptance_length" in validate.stdout

    again = dflash("fit", "--config", config)
    assert again.returncode == 2
    assert "--ckpt_path last" in again.stderr
    more = dflash("fit", "--config", config, "--trainer.max_steps", 8, "--ckpt_path", "last")
    assert more.returncode == 0, more.stderr
    assert [s for s, _ in read_scalars(run)["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (run / "config-2.yaml").is_file()

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("colour 3\ncolour 4\n")
    options = ["--target", tiny_target, "--prompts", prompts, "--max-new-tokens", 12]
    generate = dflash("generate", *options, "--drafter", run / "checkpoints" / "last.ckpt", "--json")
    assert generate.returncode == 0, generate.stderr + generate.stdout
    report = json.loads(generate.stdout)
    assert report["lossless"] is True
    assert report["acceptance_length"] >= 1.0
    assert len(report["prompts"]) == 2
    sampled = dflash("generate", *options, "--drafter", run / "checkpoints" / "last.ckpt", "--temperature", 0.8)
    assert sampled.returncode == 0, sampled.stderr
    assert "acceptance length" in sampled.stdout


def test_a_killed_run_resumes_bit_for_bit(write_config, write_chats: Callable[..., str], tmp_path: Path) -> None:
    options = {"data__target_devices": ["cpu"], "data__reuse": 2, "trainer__max_steps": 30}
    config = write_config(write_chats(60), **options, model__noise={"strength": 0.1})
    whole = dflash("fit", "--config", config, "--trainer.default_root_dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr

    run = tmp_path / "run"
    killed = start("fit", "--config", config)
    at_least = random.randrange(2, 20)
    assert wait_for(lambda: steps_saved(run) >= at_least or killed.poll() is not None, 120)
    children = descendants(killed.pid)
    assert children, "there is a producer"
    killed.kill()
    killed.wait()
    assert wait_for(lambda: not any(Path(f"/proc/{c}/cmdline").exists() for c in children), 10), "orphans"
    saved = steps_saved(run)
    resumed = dflash("fit", "--config", config, "--ckpt_path", "last")
    assert resumed.returncode == 0, resumed.stderr
    expected, got = read_scalars(tmp_path / "whole"), read_scalars(run)
    assert [s for s, _ in got["train/loss"]] == list(range(1, 31)), "one axis, no step twice"
    for tag in ("train/loss", "train/grad_norm", "train/acceptance_length", "train/lr"):
        assert got[tag][saved:] == expected[tag][saved:], tag


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_saves_where_it_stands(devices: int, write_config, write_chats, tmp_path: Path) -> None:
    """No step is lost when a cluster ends the job, and what follows equals the uninterrupted run."""
    options = {"trainer__devices": devices, "data__target_devices": ["cpu"] if devices > 1 else []}
    steps = 90 if devices == 1 else 150  # several ranks look for the signal every few seconds alone
    config = write_config(write_chats(60), trainer__max_steps=steps, checkpoint__every_n_train_steps=7, **options)

    def complete(*args: object) -> None:
        if devices == 1:
            assert dflash(*args).returncode == 0
            return
        process = start(*args)  # Lightning starts the other ranks with the command of this process
        output = process.communicate(timeout=150)[0]
        assert process.returncode == 0, output

    complete("fit", "--config", config, "--trainer.default_root_dir", tmp_path / "whole")
    run = tmp_path / "run"
    process = start("fit", "--config", config)
    assert wait_for(lambda: steps_saved(run) >= 7 or process.poll() is not None, 120)
    everyone = descendants(process.pid) | {process.pid}
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert wait_for(lambda: not any(Path(f"/proc/{p}/cmdline").exists() for p in everyone), 10), "orphans"
    saved = steps_saved(run)
    assert saved == len(read_scalars(run)["train/loss"]) < steps, "the last step that was trained"
    complete("fit", "--config", config, "--ckpt_path", "last")
    expected, got = read_scalars(tmp_path / "whole"), read_scalars(run)
    for tag in ("train/loss", "train/grad_norm", "train/lr"):
        assert got[tag] == expected[tag], tag
    # Lightning keeps the file that a run was resumed from.
    assert {f.name for f in (run / "checkpoints").glob("step=*")} == {f"step={saved}.ckpt", f"step={steps}.ckpt"}


def test_a_rank_that_still_starts_dies_with_rank_0(write_config, write_chats: Callable[..., str]) -> None:
    config = write_config(write_chats(40), trainer__devices=2, trainer__max_steps=100_000)
    process = start("fit", "--config", config, start_new_session=True)
    ranks = lambda: {p for p in descendants(process.pid) if _local_rank(p)}  # noqa: E731
    assert wait_for(lambda: bool(ranks()) or process.poll() is not None, 120)
    time.sleep(0.3)  # rank 1 imports: it has met nobody yet
    started = ranks()
    process.kill()
    process.communicate(timeout=30)
    assert started
    assert wait_for(lambda: not any(Path(f"/proc/{p}/cmdline").exists() for p in started), 5), "orphans"


def _local_rank(pid: int) -> bool:
    try:
        return b"LOCAL_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_d04_no_process_is_left_after_a_signal(how, write_config, write_chats, tmp_path: Path) -> None:
    config = write_config(write_chats(40), trainer__max_steps=100_000, data__target_devices=["cpu"])
    process = start("fit", "--config", config, start_new_session=True)
    assert wait_for(lambda: steps_saved(tmp_path / "run") > 2 or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[0]
    everyone = descendants(process.pid) | {process.pid}
    assert len(everyone) >= 2
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal sends Ctrl-C
    else:
        process.send_signal(how)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == {signal.SIGINT: 1, signal.SIGTERM: 143, signal.SIGKILL: -9}[how], output
    assert ("continue with --ckpt_path last" in output) == (how is signal.SIGTERM)
    alive = lambda: {p for p in everyone if Path(f"/proc/{p}/cmdline").exists()}  # noqa: E731
    assert wait_for(lambda: not alive(), 10), alive()


def test_a_killed_producer_ends_fit_with_its_story(
    write_config, write_chats: Callable[..., str], tmp_path: Path
) -> None:
    config = write_config(
        write_chats(40), trainer__max_steps=100_000, data__target_devices=["cpu"], data__max_restarts=0
    )
    process = start("fit", "--config", config)
    assert wait_for(lambda: steps_saved(tmp_path / "run") > 2 or process.poll() is not None, 120)
    workers = [p for p in descendants(process.pid) if b"producer.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    started = time.monotonic()
    output = process.communicate(timeout=30)[0]
    assert time.monotonic() - started < 10
    assert process.returncode != 0
    assert "SIGKILL" in output
    assert str(workers[0]) in output


BAD_INPUT = {
    "data.train": ({"data__train": "nowhere.jsonl"}, ["nowhere.jsonl", "data.train"]),
    "token_budget": ({"data__token_budget": 64}, ["data.token_budget=64", "data.max_seq_len=128"]),
    "block_size": ({"model__block_size": 1}, ["block_size=1"]),
    "mask outside": ({"model__mask_token_id": 9999}, ["mask_token_id=9999", "0..259"]),
    "mask in use": ({"model__mask_token_id": 2}, ["mask_token_id=2", "in use"]),
    "ids out of range": ({"model__target_layer_ids": [1, 99]}, ["target_layer_ids", "99"]),
    "ids twice": ({"model__target_layer_ids": [2, 2]}, ["target_layer_ids", "[2, 2]"]),
    "no such device": ({"data__target_devices": [17]}, ["data.target_devices", "17"]),
    "target": ({"data__target": "/nowhere/model"}, ["/nowhere/model"]),
    "reuse": ({"data__reuse": 0}, ["data.reuse=0"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_and_writes_nothing(case: str, write_config, write_chats, tmp_path: Path) -> None:
    changes, expected = BAD_INPUT[case]
    found = dflash("fit", "--config", write_config(write_chats(8), **changes))
    assert found.returncode == 2
    for text in expected:
        assert text in found.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_without_checkpoints_and_one_with_nothing_left_to_train(
    write_config, write_chats: Callable[..., str], tmp_path: Path
) -> None:
    config = write_config(write_chats(12), trainer__max_steps=2)
    bare = ["--trainer.default_root_dir", tmp_path / "bare", "--trainer.enable_checkpointing", "false"]
    assert dflash("fit", "--config", config, *bare).returncode == 0
    assert not (tmp_path / "bare" / "checkpoints").exists()
    whole = dflash("fit", "--config", config)
    assert whole.returncode == 0
    assert "nothing was trained" not in whole.stdout
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    again = dflash("fit", "--config", config, "--ckpt_path", "last", "--model.init_from", last)
    assert again.returncode == 0
    assert "nothing was trained: the run stands at step 2 (trainer.max_steps=2" in again.stdout
    assert "model.init_from is not read" in again.stdout


def test_resume_without_a_checkpoint_is_an_error(write_config, write_chats: Callable[..., str], tmp_path: Path) -> None:
    result = dflash("fit", "--config", write_config(write_chats(8)), "--ckpt_path", "last")
    assert result.returncode == 2
    assert "--ckpt_path last" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_bad_rows_are_counted_and_only_bad_rows_are_an_error(write_config, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}
    bad = ["{not json", json.dumps({"messages": [{"role": "wizard", "content": "x"}]}), "[]"]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join([json.dumps(good)] * 3 + bad))
    result = dflash("fit", "--config", write_config(str(file), trainer__max_steps=1))
    assert result.returncode == 0, result.stderr
    assert "wizard" in result.stdout + result.stderr
    file.write_text("\n".join(bad))
    result = dflash("fit", "--config", write_config(str(file), trainer__default_root_dir=str(tmp_path / "run2")))
    assert result.returncode == 2
    assert "mixed.jsonl" in result.stderr
    assert not (tmp_path / "run2" / "checkpoints").exists()


def test_prepare_shows_and_reports_and_fit_takes_its_folder(
    write_config, write_chats: Callable[..., str], tmp_path: Path, tiny_target: str, capsys
) -> None:
    from dflash_lightning.cli import main

    chats = Path(write_chats(12))
    chats.write_text(chats.read_text() + "{oops\n")
    out = tmp_path / "rows"
    assert main(["prepare", "--target", tiny_target, "--data", str(chats), "--out", str(out), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "|red green blue<|im_end|>|" in shown, "supervised text stands out"
    assert "12 rows" in shown
    assert "chats.jsonl:13" in shown
    assert (out / "report.json").is_file()
    fit = dflash("fit", "--config", write_config(str(out), trainer__max_steps=1))
    assert fit.returncode == 0, fit.stderr
    assert main(["prepare", "--target", tiny_target, "--data", "nowhere.jsonl", "--out", str(out)]) == 2
    assert "--data" in capsys.readouterr().err
    assert (out / "report.json").is_file(), "the old folder is not touched"


def test_help_lists_every_command(capsys) -> None:
    from dflash_lightning.cli import main

    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("fit", "validate", "prepare", "generate"))
    assert main(["conquer"]) == 2
