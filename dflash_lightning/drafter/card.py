"""The model card of an exported drafter: what it is, how it was trained, how to serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from dflash_lightning.drafter.config import mask_token_id, target_layer_ids


def model_card(config: Qwen3Config, fmt: str, dtype: str, own: dict[str, Any]) -> str:
    """Markdown; a pure function of its arguments, so that a second export writes the same bytes."""
    target = own.get("target")
    # A folder's path means nothing elsewhere.
    shown = Path(target).name if target and Path(target).is_absolute() else target
    types = config.layer_types or []
    sliding = types.count("sliding_attention")
    layers = f"{config.num_hidden_layers} ({len(types) - sliding} full, {sliding} sliding"
    layers += f", window {config.sliding_window})" if sliding else ")"
    trained = own.get("trained_max_length")
    rows = {
        "target": shown or "not recorded",
        "layers": layers,
        "hidden size": config.hidden_size,
        "block size": f"{config.block_size} (drafts {config.block_size - 1} tokens)",
        "target layers read": ", ".join(map(str, target_layer_ids(config))) + " (counted from 0)",
        "mask token id": mask_token_id(config),
        "RoPE": f"theta {(config.rope_parameters or {}).get('rope_theta')}, NeoX style",
        "trained up to": f"{trained} tokens" if trained else "not recorded",
        "optimizer steps": own.get("steps", "not recorded"),
        "weights": f"{dtype}, layout `{fmt}`, without embedding and LM head (the target's are used)",
    }
    rows |= {f"`{name}`": f"{value:.4g}" for name, value in sorted((own.get("scores") or {}).items())}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    base = f"base_model: {json.dumps(shown)}\n" if shown else ""
    method = json.dumps({"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": config.block_size - 1})
    warning = ""
    if trained and trained < config.max_position_embeddings:
        warning = (
            f"\nIt was trained on texts of up to {trained} tokens; expect shorter accepted drafts beyond, though the "
            f"target takes {config.max_position_embeddings}.\n"
        )
    return f"""---
{base}tags:
- speculative-decoding
- dflash
- dflash-lightning
---

# DFlash drafter{f" for {shown}" if shown else ""}

A drafter for block-wise speculative decoding ([DFlash](https://arxiv.org/abs/2602.06036)), trained with
dflash-lightning. It drafts for the target below and no other.

| | |
|---|---|
{table}
{warning}
## Serve it

```bash
vllm serve TARGET --speculative-config '{method}'
```
"""
