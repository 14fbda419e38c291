"""The drafter's configuration: a `Qwen3Config` with the extra fields of the released z-lab checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

# RoPE forms that stretch with the longest position of a forward: a document's result would depend on its neighbours.
_ROPE_BY_LENGTH = ("dynamic", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Target layers that feed a drafter of `num_layers` layers: spread evenly from layer 1 to layer n - 3.

    Source: the released z-lab configs, `round(1 + j * (n - 4) / (L - 1))`; `[n // 2]` for one layer.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers}: a drafter has at least 1 layer")
    if num_layers == 1:
        ids = [num_target_layers // 2]
    else:
        ids = [round(1 + j * (num_target_layers - 4) / (num_layers - 1)) for j in range(num_layers)]
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= num_target_layers:
        raise ValueError(
            f"num_layers={num_layers}: the default target_layer_ids for a target of {num_target_layers} layers would "
            f"be {ids}; use at most {max(num_target_layers - 3, 1)} drafter layers or set target_layer_ids yourself"
        )
    return ids


def check_target_layer_ids(ids: Sequence[int], num_target_layers: int) -> None:
    """Raise ValueError unless `ids` are distinct decoder layers of the target, counted from 0."""
    ids = list(ids)
    if not ids:
        raise ValueError("target_layer_ids=[]: name at least one target layer")
    if len(set(ids)) < len(ids):
        raise ValueError(f"target_layer_ids={ids}: a layer is named twice; each layer may be named once")
    if min(ids) < 0 or max(ids) >= num_target_layers:
        raise ValueError(
            f"target_layer_ids={ids}: the target has {num_target_layers} layers, so ids run from 0 to "
            f"{num_target_layers - 1} (id i is the output of decoder layer i)"
        )


def build_draft_config(
    target_config: PretrainedConfig,
    *,
    num_layers: int = 5,
    block_size: int = 16,
    target_layer_ids: Sequence[int] | None = None,
    mask_token_id: int,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    sliding_causal: bool = True,
    overrides: dict[str, Any] | None = None,
) -> Qwen3Config:
    """Configuration of a drafter for `target_config` (any Hugging Face causal LM; nested text configs are opened).

    Sizes, norm epsilon and RoPE theta follow the target, with the default RoPE form; `overrides` replaces any Qwen3
    field (`num_attention_heads`, `rope_parameters`, ...) except the hidden size, which must be the target's because the
    drafter borrows its embedding and LM head. Raises ValueError, naming the option, for values that cannot work.
    """
    text = target_config.get_text_config()
    overrides = dict(overrides or {})
    num_target_layers = text.num_hidden_layers
    layer_types = list(layer_types) if layer_types is not None else ["full_attention"] * num_layers
    _check_options(text, num_layers, block_size, mask_token_id, layer_types, sliding_window, overrides)

    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(num_target_layers, num_layers)
    target_layer_ids = [int(i) for i in target_layer_ids]
    check_target_layer_ids(target_layer_ids, num_target_layers)

    sliding = "sliding_attention" in layer_types
    fields = {
        **_fields_of_target(text, overrides),
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": layer_types,
        "use_sliding_window": sliding,
        "sliding_window": sliding_window if sliding else None,
        "max_window_layers": num_layers,
        **overrides,
    }
    own_fields = {
        "block_size": block_size,
        "num_target_layers": num_target_layers,
        "dflash_config": {
            "mask_token_id": int(mask_token_id),
            "target_layer_ids": target_layer_ids,
            "block_size": block_size,
            "sliding_causal": bool(sliding_causal),
        },
    }
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}: the second must divide the first; "
            "set both in overrides"
        )
    config = Qwen3Config(**fields, **own_fields)
    check_supported(config, "overrides")
    return config


def check_supported(config: Qwen3Config, where: str) -> None:
    """Raise ValueError, naming `where`, for a field that the drafter would not follow."""
    assert config.layer_types is not None
    window = config.sliding_window
    if "sliding_attention" in config.layer_types and (window is None or window < config.block_size):
        raise ValueError(
            f"{where}: sliding_window={window} with sliding layers; it must be at least block_size={config.block_size}"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"{where}: hidden_act={config.hidden_act!r} is not supported; the drafter's layers use 'silu'")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in _ROPE_BY_LENGTH:
        raise ValueError(
            f"{where}: rope_type={rope_type!r} is not supported: its frequencies depend on the longest document of a "
            "batch; use 'default', 'linear', 'llama3' or 'yarn'"
        )


def target_layer_ids(config: PretrainedConfig) -> list[int]:
    """Target layers whose outputs the drafter reads, in the order in which they lie side by side."""
    return list(config.dflash_config["target_layer_ids"])


def mask_token_id(config: PretrainedConfig) -> int:
    """Token whose embedding fills the block slots 1..K-1."""
    return config.dflash_config["mask_token_id"]


def sliding_causal(config: PretrainedConfig) -> bool:
    """Whether a sliding layer lets slot k see only the slots 0..k of its block (z-lab configs lack the field: yes)."""
    return config.dflash_config.get("sliding_causal", True)


def _check_options(text, num_layers, block_size, mask_token_id, layer_types, sliding_window, overrides) -> None:
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: a block holds the anchor and at least 1 drafted token, so use >= 2")
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers}: a drafter has at least 1 layer")
    if not 0 <= mask_token_id < text.vocab_size:
        raise ValueError(
            f"mask_token_id={mask_token_id}: the target's embedding has {text.vocab_size} rows, so use an id from 0 to "
            f"{text.vocab_size - 1}, best a special token that the text never holds"
        )
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types={layer_types}: {len(layer_types)} names for num_layers={num_layers} layers")
    if unknown := sorted(set(layer_types) - set(LAYER_TYPES)):
        raise ValueError(f"layer_types={layer_types}: unknown {unknown}; use {' or '.join(LAYER_TYPES)}")
    if "sliding_attention" in layer_types:
        if sliding_window is None:
            raise ValueError(
                "sliding_window=None: layer_types has sliding layers, which need a window, for example 2048"
            )
        if sliding_window < block_size:
            raise ValueError(
                f"sliding_window={sliding_window}: a window shorter than block_size={block_size} hides the anchor from "
                f"the last slots; use at least {block_size}"
            )
    known = set(Qwen3Config().to_dict())
    own = {"num_hidden_layers": "num_layers", "layer_types": "layer_types", "sliding_window": "sliding_window"}
    for name, value in overrides.items():
        if name in own or name == "use_sliding_window":
            option = own.get(name, "layer_types")
            raise ValueError(f"overrides[{name!r}]={value!r}: set the option {option} instead")
        if name not in known:
            raise ValueError(f"overrides[{name!r}]={value!r}: Qwen3Config has no such field; it has {sorted(known)}")
    hidden_size = overrides.get("hidden_size", text.hidden_size)
    if hidden_size != text.hidden_size:
        raise ValueError(
            f"overrides['hidden_size']={hidden_size}: the drafter borrows the target's embedding and LM head, so its "
            f"hidden size must be the target's, {text.hidden_size}"
        )


def _fields_of_target(text: PretrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    heads = overrides.get("num_attention_heads", text.num_attention_heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    # Read from the dictionary: targets whose layers differ (Gemma 4) refuse the attribute, and any size works for us.
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // heads
    intermediate_size = overrides.get("intermediate_size", getattr(text, "intermediate_size", None))
    if intermediate_size is None:
        raise ValueError(
            f"intermediate_size: the target's {type(text).__name__} has no such field; "
            f"set overrides={{'intermediate_size': {4 * text.hidden_size}}} or another size"
        )
    fields = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
    }
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        fields[name] = getattr(text, name, None)
    return fields


def _rope_theta(text: PretrainedConfig) -> float:
    rope = getattr(text, "rope_parameters", None) or {}
    # Gemma 3 and others keep one dictionary a layer type; the global layers' theta is the one made for long contexts.
    rope = rope.get("full_attention", rope)
    # Targets without rotary positions (GPT-2, OPT) have no theta; any works, so take Qwen3Config's own default.
    return float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0)
