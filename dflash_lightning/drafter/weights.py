"""Read a drafter from a folder (config.json and safetensors) or from a Lightning checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from dflash_lightning.drafter.model import DFlashDraftModel

_PREFIX = "drafter."


def load_drafter(path: str | Path, expect: Qwen3Config | None = None) -> DFlashDraftModel:
    """The drafter of `path`, on the CPU in eval mode.

    Args:
        path: a folder with config.json and *.safetensors in the released layout, or a checkpoint of DFlashModule.
        expect: refuse a drafter whose sizes or layer ids differ from this configuration.

    Raises:
        FileNotFoundError: neither is there. ValueError: keys are missing or differ.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        config, weights = _from_folder(path)
    elif path.is_file():
        config, weights = _from_checkpoint(path)
    else:
        raise FileNotFoundError(f"drafter {path}: no such folder or checkpoint")
    if expect is not None:
        _check_same(config, expect, path)
    drafter = DFlashDraftModel(config)
    missing, unexpected = drafter.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(f"drafter {path}: missing tensors {missing}, unexpected tensors {unexpected}")
    return drafter.eval()


def _from_folder(path: Path) -> tuple[Qwen3Config, dict[str, torch.Tensor]]:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"drafter {path}: the folder has no config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"drafter {path}: the folder has no *.safetensors")
    fields = json.loads((path / "config.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(file)
    # The target's own, which some engines want beside the drafter's; ours are borrowed from the target.
    weights = {k: v for k, v in weights.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    return _config(fields, path), weights


def _from_checkpoint(path: Path) -> tuple[Qwen3Config, dict[str, torch.Tensor]]:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    saved = checkpoint.get("dflash_lightning")
    if saved is None:
        raise ValueError(f"drafter {path}: not a checkpoint of dflash-lightning")
    weights = {k.removeprefix(_PREFIX): v for k, v in checkpoint["state_dict"].items() if k.startswith(_PREFIX)}
    return _config(saved["draft_config"], path), weights


def _config(fields: dict[str, Any], path: Path) -> Qwen3Config:
    for key in ("dflash_config", "block_size"):
        if key not in fields:
            raise ValueError(f"drafter {path}: its config has no {key}")
    for key in ("mask_token_id", "target_layer_ids"):
        if key not in fields["dflash_config"]:
            raise ValueError(f"drafter {path}: its config has no dflash_config.{key}")
    return Qwen3Config(**{k: v for k, v in fields.items() if k not in ("architectures", "auto_map", "model_type")})


def _check_same(config: Qwen3Config, expect: Qwen3Config, path: Path) -> None:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("head_dim", "layer_types", "sliding_window", "rope_parameters")
    differ = [k for k in keys if getattr(config, k, None) != getattr(expect, k, None)]
    if config.dflash_config["target_layer_ids"] != expect.dflash_config["target_layer_ids"]:
        differ.append("target_layer_ids")
    if differ:
        listed = ", ".join(f"{k} ({getattr(config, k, None)} there, {getattr(expect, k, None)} here)" for k in differ)
        raise ValueError(f"model.init_from={path}: the drafter there differs in {listed}")
