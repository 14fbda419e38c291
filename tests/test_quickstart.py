"""The README's quickstart on the real target, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent

# Every stage that the quickstart has; a synthetic run in callbacks/test_stage_profiler.py has the others.
STAGES = {
    "target.load_batch",
    "target.model_forward",
    "target.pack_hidden",
    "target.queue_put_wait",
    "drafter.queue_wait",
    "drafter.batch_start",
    "drafter.forward",
    "drafter.in_step",
    "drafter.backward",
    "drafter.optimizer_step",
    "drafter.grad_norm_sync",
    "drafter.metrics_sync",
    "drafter.between_steps",
    "drafter.checkpoint",
    "drafter.profile",
    "drafter.other",
    "dflash.block_layout",
    "dflash.create_block_mask_full",
    "dflash.layers",
    "dflash.loss",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quickstart_trains_decodes_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/quickstart.py", "--run-dir", str(tmp_path / "run"), "--max-new-tokens", "4"]
    command += [
        "--",
        "--trainer.max_steps",
        "8",
        "--checkpoint.every_n_train_steps",
        "5",
        "--checkpoint.keep_all",
        "true",
    ]
    command += ["--profile.profile_interval", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=780, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert set(result) == {"acceptance_before", "acceptance_after", "lossless", "train_seconds"}
    assert result["lossless"] is True
    assert 1.0 <= result["acceptance_before"] < 1.05
    assert result["acceptance_after"] >= 1.0
    assert "tensorboard --logdir" in done.stdout
    check_tensorboard(tmp_path / "run", last_step=8)

    # Go on from a checkpoint before the last step: its points must replace those of the first run.
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step=8.ckpt")
    newest.unlink()
    command = ["-m", "dflash_lightning", "fit", "--config", "configs/quickstart.yaml", "--ckpt_path", "last"]
    command += ["--trainer.default_root_dir", str(tmp_path / "run"), "--trainer.max_steps", "10"]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=400, cwd=ROOT)
    check_tensorboard(tmp_path / "run", last_step=10)


def check_tensorboard(run: Path, last_step: int) -> None:
    """Every stage has its scalars, one point a window at rising steps; nothing is logged twice."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    for kind in ("avg_ms", "max_ms", "total_s", "share", "count"):
        assert {t.removeprefix(f"profile/{kind}/") for t in tags if t.startswith(f"profile/{kind}/")} == STAGES
    for tag in tags:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, last_step + 1))
    assert min(event.value for event in events.Scalars("profile/coverage")) >= 0.98


def test_readme_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quickstart", "test", "test-slow"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in makefile
    for config in (ROOT / "configs").glob("*.yaml"):
        assert f"configs/{config.name}" in readme
