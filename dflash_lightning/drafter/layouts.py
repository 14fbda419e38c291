"""The two layouts of a drafter's config.json, written and read back without loss: z-lab's (`hf`) and `speculators`.

Layer ids: `hf` counts decoder layers from 0 (id i is the output of layer i); `speculators` counts hidden states, of
which 0 is the embedding, so the same layer is i + 1. Sources: the released z-lab configs; vllm-project/speculators'
DFlash config, and vLLM's translation of it.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

from dflash_lightning.drafter.config import check_supported, mask_token_id, sliding_causal, target_layer_ids

FORMATS = ("hf", "speculators")
OWN_KEY = "dflash_lightning"  # what no engine reads: trained length, rotary style, training summary
ROPE_STYLE = "neox"  # halves are rotated against each other, not neighbours
_SPECULATORS_VERSION = "0.5.0"
_LAYER_FIELDS = (
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps",
    "sliding_window", "tie_word_embeddings", "use_cache", "use_sliding_window", "vocab_size",
)  # fmt: skip
# Engines take a default where one is missing, and draft worse without a word.
_LAYER_REQUIRED = (
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size",
)  # fmt: skip
REQUIRED = {
    "hf": (
        "architectures", "model_type", "block_size", "num_target_layers", "dtype", "dflash_config.block_size",
        "dflash_config.mask_token_id", "dflash_config.target_layer_ids", *_LAYER_REQUIRED,
    ),
    "speculators": (
        "architectures", "speculators_model_type", "speculators_version", "block_size", "num_target_layers", "dtype",
        "draft_vocab_size", "mask_token_id", "aux_hidden_state_layer_ids", "sliding_window_non_causal",
        "speculators_config.algorithm", "speculators_config.proposal_methods",
        "speculators_config.verifier.name_or_path", "transformer_layer_config.model_type",
        *(f"transformer_layer_config.{name}" for name in _LAYER_REQUIRED),
    ),
}  # fmt: skip


def write_fields(config: Qwen3Config, fmt: str, dtype: str, own: dict[str, Any]) -> dict[str, Any]:
    """config.json of `config` in the layout `fmt`; `own` goes under our key. ValueError for what has no place there."""
    if fmt not in FORMATS:
        raise ValueError(f"--format {fmt}: use one of {', '.join(FORMATS)}")
    check_supported(config, "the drafter")
    fields = _hf_fields(config) if fmt == "hf" else _speculators_fields(config, own)
    return {**fields, "dtype": dtype, OWN_KEY: {"rope_style": ROPE_STYLE, **own}}


def read_fields(fields: dict[str, Any], where: str) -> tuple[Qwen3Config, dict[str, Any]]:
    """Configuration and our own entries of a config.json in either layout. Raises ValueError, naming `where`."""
    fields = dict(fields)
    own = dict(fields.pop(OWN_KEY, None) or {})
    if own.pop("rope_style", ROPE_STYLE) != ROPE_STYLE:
        raise ValueError(f"{where}: its rotary embedding is not of the {ROPE_STYLE!r} style, which is all we know")
    if "speculators_model_type" in fields:
        fields = _from_speculators(fields, where)
    dflash = dict(fields.get("dflash_config") or {})
    for key in ("mask_token_id", "target_layer_ids"):
        if key not in dflash:
            raise ValueError(f"{where}: its config has no dflash_config.{key}")
    sizes = {size for size in (fields.get("block_size"), dflash.get("block_size")) if size is not None}
    if len(sizes) != 1:
        problem = f"names two, {sorted(sizes)}" if sizes else "has none"
        raise ValueError(f"{where}: block_size stands at the top level and in dflash_config; the config {problem}")
    fields["block_size"] = sizes.pop()
    causal = dflash.pop("causal", None)
    top = fields.pop("is_causal", None)
    causal = causal if top is None else top
    if causal is not None:
        if causal and set(fields.get("layer_types") or ["full_attention"]) != {"sliding_attention"}:
            raise ValueError(
                f"{where}: causal full-attention layers are not supported; only sliding ones may be causal"
            )
        dflash["sliding_causal"] = bool(causal)
    if fields.get("draft_vocab_size") not in (None, fields.get("vocab_size")):
        raise ValueError(
            f"{where}: a drafter with a vocabulary of its own (draft_vocab_size={fields['draft_vocab_size']}) is not "
            "supported; ours drafts with the target's"
        )
    skipped = ("architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version")
    config = Qwen3Config(**{**{k: v for k, v in fields.items() if k not in skipped}, "dflash_config": dflash})
    check_supported(config, where)
    return config, own


def missing_fields(fields: dict[str, Any], fmt: str) -> list[str]:
    """Required fields that are absent or null, those that only sliding layers need included."""
    paths = list(REQUIRED[fmt])
    prefix = "transformer_layer_config." if fmt == "speculators" else ""
    layer = fields.get("transformer_layer_config") or {} if prefix else fields
    if "sliding_attention" in (layer.get("layer_types") or ()):
        paths += [f"{prefix}sliding_window", f"{prefix}use_sliding_window"]
        if not (fields.get("dflash_config") or {}).get("sliding_causal", True):
            paths.append("dflash_config.causal")
    missing = []
    for path in paths:
        value: Any = fields
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            missing.append(path)
    return missing


def _layer_fields(config: Qwen3Config) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in _LAYER_FIELDS}
    rope = dict(config.rope_parameters or {})
    # Flat, as z-lab's configs have it: engines that do not know `rope_parameters` would take their default theta.
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return {"model_type": "qwen3", **fields}


def _hf_fields(config: Qwen3Config) -> dict[str, Any]:
    dflash = {**config.dflash_config, "block_size": config.block_size}
    dflash.setdefault("sliding_causal", True)
    assert config.layer_types is not None
    if "sliding_attention" in config.layer_types and not sliding_causal(config):
        dflash["causal"] = False  # vLLM would make sliding layers causal
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer_fields(config),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": dflash,
    }


def _speculators_fields(config: Qwen3Config, own: dict[str, Any]) -> dict[str, Any]:
    types = set(config.layer_types or ())
    causal = "sliding_attention" in types and sliding_causal(config)
    if causal and "full_attention" in types:
        raise ValueError(
            "--format speculators: this layout has one causality for all layers, and the drafter mixes full layers "
            "with causal sliding ones; use --format hf"
        )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": own.get("target") or ""},
        },
        "transformer_layer_config": _layer_fields(config),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": mask_token_id(config),
        "aux_hidden_state_layer_ids": [i + 1 for i in target_layer_ids(config)],
        # The whole vocabulary: no d2t and t2d maps, and the head is the target's.
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        # Never left out: vLLM then takes true, the speculators library false.
        "sliding_window_non_causal": not causal,
    }


def _from_speculators(fields: dict[str, Any], where: str) -> dict[str, Any]:
    kind = fields["speculators_model_type"]
    if kind != "dflash":
        raise ValueError(f"{where}: speculators_model_type={kind!r}; a DFlash drafter has 'dflash'")
    for key in ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size"):
        if fields.get(key) is None:
            raise ValueError(f"{where}: its config has no {key}")
    if fields.get("sample_from_anchor"):
        raise ValueError(f"{where}: sample_from_anchor drafters predict from slot 0; not supported")
    layer = dict(fields["transformer_layer_config"])
    sliding = "sliding_attention" in (layer.get("layer_types") or ())
    dflash = {
        "mask_token_id": fields["mask_token_id"],
        "target_layer_ids": [i - 1 for i in fields["aux_hidden_state_layer_ids"]],
        "block_size": fields["block_size"],
        "sliding_causal": not (sliding and fields.get("sliding_window_non_causal", False)),
    }
    if "draft_vocab_size" in fields:
        layer["draft_vocab_size"] = fields["draft_vocab_size"]
    own = {"block_size": fields["block_size"], "num_target_layers": fields.get("num_target_layers")}
    layer = layer | own | {"dflash_config": dflash}
    # Equal to the vocabulary (read_fields refuses the rest), so it says nothing.
    if layer.get("draft_vocab_size") == layer.get("vocab_size"):
        layer.pop("draft_vocab_size", None)
    return layer
