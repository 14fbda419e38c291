"""Imports go one way, and the packages that run on GPU machines need no data or CLI libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dflash_lightning"

# Part -> parts of the package that it may import, besides itself.
ALLOWED = {
    "batch": set(),
    "profiling": set(),
    "device_times": {"profiling"},
    "schedules": set(),
    "optim": set(),
    "orphans": set(),
    "log_training": {"profiling"},
    "sigterm": set(),
    "settings": set(),
    "target": set(),
    "drafter": {"batch"},
    "data": set(),
    "producer": {"target", "batch", "orphans", "profiling"},
    "loader": {"batch", "drafter.layout", "producer", "profiling", "transfer"},
    "transfer": {"batch", "profiling"},
    "placement": {"producer"},
    "cursor": {"batch"},
    "row_sets": {"data", "target"},
    "datamodule": {"producer", "row_sets", "batch", "loader", "placement", "cursor", "settings", "target", "profiling"},
    "module": {
        "drafter",
        "batch",
        "device_times",
        "log_training",
        "profiling",
        "schedules",
        "settings",
        "sigterm",
        "target",
    },
    "fill_cache": {"drafter.config", "placement", "producer", "row_sets", "target"},
    "row_figures": {"producer"},
    "prepare": {"cli", "data", "fill_cache", "row_figures", "target"},
    "regenerate": {"cli", "data", "target"},
    "prompts": {"data"},
    "speculative": {"drafter", "target", "prompts"},
    "chat": {"drafter", "speculative"},
    "generate": {"chat", "cli", "drafter", "prompts", "speculative"},
    "export": {"drafter"},
    "training_cli": {"module", "datamodule", "callbacks"},
    "cli": {"orphans", "training_cli", "generate", "prepare", "profile_run"},
    "callbacks": {"profiling", "pipeline", "drafter", "speculative", "prompts"},
    "pipeline": {"profiling"},
    "profile_run": {"pipeline", "profiling"},
}


def _imports(file: Path, package: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                found.add(".".join([*base, *([node.module] if node.module else [])]))
            elif node.module:
                found.add(node.module)
    return {name.removeprefix("dflash_lightning.") for name in found if name.startswith("dflash_lightning.")}


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_only_downward(part: str) -> None:
    home = ROOT / "callbacks" if part == "callbacks" else PACKAGE / part
    files = sorted(home.rglob("*.py")) if home.is_dir() else [PACKAGE / f"{part}.py"]
    for file in files:
        for name in _imports(file, f"dflash_lightning.{part}"):
            allowed = name.split(".")[0] == part or any(name == a or name.startswith(a + ".") for a in ALLOWED[part])
            assert allowed, f"{file.relative_to(ROOT)} imports dflash_lightning.{name}"


def test_every_part_has_a_rule() -> None:
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    assert parts - {"__init__", "__main__"} <= set(ALLOWED)


def test_d05_training_side_imports_without_cuda_datasets_and_jsonargparse() -> None:
    code = """
import sys
sys.modules['datasets'] = None
sys.modules['jsonargparse'] = None
import dflash_lightning.batch, dflash_lightning.profiling, dflash_lightning.module
import dflash_lightning.drafter.model, dflash_lightning.drafter.objective, dflash_lightning.drafter.decoding
import torch
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_config_parses(config: Path, monkeypatch, capsys) -> None:
    from dflash_lightning.cli import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["dflash"])
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(config), "--print_config"])
    assert end.value.code in (None, 0)
    assert "block_size" in capsys.readouterr().out
