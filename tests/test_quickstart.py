"""The README's quickstart on the real target, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_quickstart_trains_decodes_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/quickstart.py", "--run-dir", str(tmp_path / "run"), "--max-new-tokens", "8"]
    command += ["--", "--trainer.max_steps", "12", "--checkpoint.every_n_train_steps", "5"]
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


def test_readme_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quickstart", "test", "test-slow"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in makefile
    for config in (ROOT / "configs").glob("*.yaml"):
        assert f"configs/{config.name}" in readme
