"""Twenty SIGKILLs at random moments: whatever dies, the resumed run trains the same rows in the same order."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from dflash_lightning import DFlashModule, HiddenStateDataModule
from dflash_lightning.callbacks import AtomicCheckpointIO, DrafterCheckpoint, find_last_checkpoint

options = json.loads(sys.argv[1])
torch.set_num_threads(1)


class Log(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        line = json.dumps([trainer.global_step, list(batch.row_ids), float(outputs["loss"])])
        with open(f"{options['out']}/rank{trainer.global_rank}.jsonl", "a") as file:
            file.write(line + "\\n")
        time.sleep(options["pause"])  # a step long enough to be killed in


if __name__ == "__main__":
    torch.manual_seed(0)
    out = Path(options["out"])
    out.mkdir(exist_ok=True)
    module = DFlashModule(options["target"], num_layers=2, block_size=4, max_anchors=16)
    data = HiddenStateDataModule(
        options["target"], train=options["train"], target_devices=["cpu", "cpu"], token_budget=64, max_seq_len=64,
        num_buckets=2, queue_depth=4, max_restarts=50, reuse=2,
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(broadcast_buffers=False, process_group_backend="gloo"),
        max_steps=options["steps"], logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=str(out), plugins=[AtomicCheckpointIO()],
        callbacks=[Log(), DrafterCheckpoint(1)],
    )
    trainer.fit(module, datamodule=data, ckpt_path=find_last_checkpoint(out / "checkpoints"), weights_only=True)
"""
STEPS, KILLS = 200, 20


def read_log(out: Path, rank: int) -> dict[int, tuple[list[int], float]]:
    """Step -> rows and loss; a step that was trained again after a kill must equal itself."""
    log: dict[int, tuple[list[int], float]] = {}
    for line in (out / f"rank{rank}.jsonl").read_text().splitlines():
        try:
            step, rows, loss = json.loads(line)
        except json.JSONDecodeError:  # the kill came in the middle of the line
            continue
        assert log.setdefault(step, (rows, loss)) == (rows, loss), f"step {step} of rank {rank} came out differently"
    return log


def run_processes(tag: str) -> dict[int, str]:
    """Processes of this test: pid -> command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().decode(errors="replace")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"DFLASH_TEST_RUN={tag}" in environment and command:
            found[int(process.name)] = command
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_lose_and_repeat_nothing(
    tiny_target: str, write_chats: Callable[..., str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = {"target": tiny_target, "train": write_chats(100), "steps": STEPS, "pause": 0.0}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tag = f"storm-{os.getpid()}"
    environment = {**os.environ, "DFLASH_TEST_RUN": tag, "TMPDIR": str(scratch)}

    def start(out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), json.dumps(options | {"out": str(out)})]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    whole = start(tmp_path / "whole")
    assert whole.wait(timeout=170) == 0, whole.stderr.read().decode() if whole.stderr else ""

    chance = random.Random(time.time_ns())
    kills, storm = 0, tmp_path / "storm"
    options["pause"] = 0.1
    process = start(storm)
    while True:
        time.sleep(chance.uniform(0.2, 2.0) if kills < KILLS else 0.5)
        code = process.poll()
        if code is not None:
            left = time.monotonic() + 12
            while run_processes(tag) and time.monotonic() < left:
                time.sleep(0.1)
            assert not run_processes(tag), "a process outlived its run"
            if code == 0:
                break
            process = start(storm)
            continue
        # Not before training: what is to be tested is the loss of work that was done.
        trained = (storm / "rank0.jsonl").exists()
        victims = [pid for pid, command in run_processes(tag).items() if "train.py" in command or "worker" in command]
        if kills < KILLS and trained and victims:
            os.kill(chance.choice(victims), signal.SIGKILL)
            kills += 1
    assert kills == KILLS, "the run was over too soon"

    for rank in range(2):
        expected, got = read_log(tmp_path / "whole", rank), read_log(storm, rank)
        assert got == expected, f"rank {rank}"
    assert not list((storm / "checkpoints").glob("*.partial"))
    assert [p.name for p in scratch.iterdir() if p.name.startswith("dflash-")] == [], "a socket's folder is left"
