"""Read a drafter: a folder in either exported layout, or a Lightning checkpoint, also of a run that goes on."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_lightning.drafter.config import mask_token_id, target_layer_ids
from dflash_lightning.drafter.layouts import read_fields
from dflash_lightning.drafter.model import DFlashDraftModel

_PREFIX = "drafter."
_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class DrafterFiles:
    """What a folder or a checkpoint says about a drafter."""

    config: Qwen3Config
    weights: dict[str, Tensor]
    own: dict[str, Any] = field(default_factory=dict)  # training summary and trained length, as far as they are known


def load_drafter(path: str | Path, expect: Qwen3Config | None = None) -> DFlashDraftModel:
    """The drafter of `path`, on the CPU in eval mode, in float32.

    Args:
        path: a folder with config.json and *.safetensors (z-lab's or speculators' layout), or a checkpoint of
            DFlashModule.
        expect: refuse a drafter whose sizes or layer ids differ from this configuration.

    Raises:
        FileNotFoundError: neither is there. ValueError: keys are missing or differ.
    """
    files = read_drafter(path)
    if expect is not None:
        _check_same(files.config, expect, Path(path))
    drafter = DFlashDraftModel(files.config)
    missing, unexpected = drafter.load_state_dict(files.weights, strict=False)
    if missing or unexpected:
        raise ValueError(f"drafter {path}: missing tensors {missing}, unexpected tensors {unexpected}")
    return drafter.eval()


def read_drafter(path: str | Path) -> DrafterFiles:
    """Configuration, tensors as stored, and training summary; raises as `load_drafter` does."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_checkpoint(path)
    raise FileNotFoundError(f"drafter {path}: no such folder or checkpoint")


def _from_folder(path: Path) -> DrafterFiles:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"drafter {path}: the folder has no config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"drafter {path}: the folder has no *.safetensors")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    if maps := sorted({"d2t", "t2d"} & set(weights)):
        raise ValueError(f"drafter {path}: it maps a vocabulary of its own ({', '.join(maps)}); not supported")
    # The target's own, which some engines want beside the drafter's; ours are borrowed from the target.
    weights = {k: v for k, v in weights.items() if k not in _OF_THE_TARGET}
    config, own = read_fields(json.loads((path / "config.json").read_text()), f"drafter {path}")
    return DrafterFiles(config, weights, own)


def _from_checkpoint(path: Path) -> DrafterFiles:
    if not zipfile.is_zipfile(path):  # the archive's directory is written last
        raise ValueError(f"drafter {path}: not a checkpoint, or the file is cut off")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    saved = checkpoint.get("dflash_lightning")
    if saved is None:
        raise ValueError(f"drafter {path}: not a checkpoint of dflash-lightning")
    weights = {k.removeprefix(_PREFIX): v for k, v in checkpoint["state_dict"].items() if k.startswith(_PREFIX)}
    config, _ = read_fields(saved["draft_config"], f"drafter {path}")
    own: dict[str, Any] = {
        "target": saved.get("target"),
        "steps": checkpoint.get("global_step"),
        "epoch": checkpoint.get("epoch"),
        "trained_max_length": saved.get("trained_max_length"),
        "scores": {**_monitored(checkpoint.get("callbacks") or {}), **(saved.get("scores") or {})},
    }
    return DrafterFiles(config, weights, {k: v for k, v in own.items() if v not in (None, {})})


def _monitored(callbacks: dict[str, Any]) -> dict[str, float]:
    """Scores that any ModelCheckpoint watched, at the time of saving."""
    states = [s for s in callbacks.values() if isinstance(s, dict) and s.get("monitor")]
    return {s["monitor"]: float(s["current_score"]) for s in states if s.get("current_score") is not None}


def _check_same(config: Qwen3Config, expect: Qwen3Config, path: Path) -> None:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("head_dim", "layer_types", "sliding_window", "rope_parameters", "vocab_size")
    pairs = {k: (getattr(config, k, None), getattr(expect, k, None)) for k in keys}
    pairs["target_layer_ids"] = (target_layer_ids(config), target_layer_ids(expect))
    pairs["mask_token_id"] = (mask_token_id(config), mask_token_id(expect))
    listed = ", ".join(f"{k} ({there} there, {here} here)" for k, (there, here) in pairs.items() if there != here)
    if listed:
        raise ValueError(f"model.init_from={path}: the drafter there differs in {listed}")
