"""Two real ranks and a real producer: the second rank's spans reach rank 0 through the pool, without a collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_lightning.pipeline.windows import read_windows

SCRIPT = """
import json, sys
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from dflash_lightning import DFlashModule, HiddenStateDataModule, span
from dflash_lightning.callbacks import StageProfilerCallback

options = json.loads(sys.argv[1])
torch.set_num_threads(1)


class OnlyRank1(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1:
            with span("drafter.only_rank_1"):
                pass

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if options["fail"] and batch_idx == 5:
            raise RuntimeError("raised on purpose")


if __name__ == "__main__":
    module = DFlashModule(options["target"], num_layers=2, block_size=4, max_anchors=16)
    data = HiddenStateDataModule(
        options["target"], train=options["train"], target_devices=["cpu"], token_budget=256, max_seq_len=128,
        num_buckets=1, queue_depth=4,
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=10,
        strategy=DDPStrategy(broadcast_buffers=False, process_group_backend="gloo"), enable_checkpointing=False,
        num_sanity_val_steps=0, default_root_dir=options["out"], max_epochs=-1,
        callbacks=[OnlyRank1(), StageProfilerCallback(options["interval"])],
    )
    trainer.fit(module, datamodule=data)
"""


@pytest.mark.parametrize(("interval", "fail"), [(0.01, False), (600, False), (600, True)])
def test_the_other_ranks_spans_arrive(
    tiny_target: str, write_chats: Callable[..., str], tmp_path: Path, interval: float, fail: bool
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = {"target": tiny_target, "train": write_chats(80), "out": str(out), "interval": interval, "fail": fail}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
    )
    assert (done.returncode != 0) == fail, done.stdout + done.stderr
    windows = read_windows(out)
    assert windows[-1].closed_by == ("exception" if fail else "end")
    assert len(windows) == 1 or interval < 1
    count = sum(w.lanes["rank0"]["drafter.forward"].count for w in windows if w.batches)
    assert count == (6 if fail else 10)
    if not fail:  # after an exception rank 1 may be killed before it can report
        seen = [w.lanes["rank1"] for w in windows if "rank1" in w.lanes]
        assert sum(lane["drafter.only_rank_1"].count for lane in seen if "drafter.only_rank_1" in lane) == 10
        assert sum(w.group_steps for w in windows) == 10
    assert not any("drafter.only_rank_1" in w.lanes["rank0"] for w in windows)
    assert all("producer0" in w.lanes for w in windows)
