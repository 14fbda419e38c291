"""The drafter's configuration."""

from __future__ import annotations

import pytest
from transformers import Gemma4Config, GPT2Config, LlamaConfig, Qwen3Config

from dflash_lightning.drafter.config import (
    build_draft_config,
    check_supported,
    check_target_layer_ids,
    default_target_layer_ids,
)


@pytest.mark.parametrize(
    ("target_layers", "layers", "ids"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (30, 5, [1, 8, 14, 20, 27]), (28, 1, [14])],
)
def test_default_target_layers(target_layers, layers, ids):
    assert default_target_layer_ids(target_layers, layers) == ids


def test_fields_of_the_reference(reference):
    wanted = reference["json"]["hf_config"]
    rope = wanted["rope_parameters"]
    target = Qwen3Config(
        **{name: wanted[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
        **{name: wanted[name] for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
        num_hidden_layers=8,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    config = build_draft_config(target, num_layers=2, block_size=4, target_layer_ids=[1, 2], mask_token_id=319)
    found = config.to_dict()
    for name, value in wanted.items():
        if name == "dflash_config":
            assert value.items() <= found[name].items()
        else:
            assert found[name] == value, name
    again = Qwen3Config.from_dict(found)
    assert again.dflash_config == config.dflash_config
    assert again.block_size == 4


def test_sliding_fields():
    target = LlamaConfig(num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    types = ["sliding_attention", "full_attention"]
    config = build_draft_config(
        target, num_layers=2, mask_token_id=3, layer_types=types, sliding_window=64, sliding_causal=False
    )
    assert config.layer_types == types
    assert (config.use_sliding_window, config.sliding_window) == (True, 64)
    assert config.dflash_config["sliding_causal"] is False
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_only_theta_is_taken_from_a_scaled_target():
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    target = Qwen3Config(num_hidden_layers=8, rope_parameters=rope)
    plain = build_draft_config(target, num_layers=2, mask_token_id=3)
    assert plain.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    scaled = build_draft_config(target, num_layers=2, mask_token_id=3, overrides={"rope_parameters": rope})
    assert scaled.rope_parameters["factor"] == 8.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"mask_token_id": 96}, "mask_token_id=96: .* from 0 to 95"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"target_layer_ids": [1, 8]}, r"target_layer_ids=\[1, 8\]: .* from 0 to 7"),
        ({"target_layer_ids": [3, 3]}, r"target_layer_ids=\[3, 3\]"),
        ({"target_layer_ids": []}, r"target_layer_ids=\[\]"),
        ({"num_layers": 7}, "num_layers=7"),
        ({"layer_types": ["full_attention"]}, "layer_types="),
        ({"layer_types": ["full_attention", "local"]}, "unknown .*local"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_window=8: .* at least 16"),
        ({"overrides": {"hidden_size": 64}}, r"overrides\['hidden_size'\]=64: .*32"),
        ({"overrides": {"num_heads": 4}}, r"overrides\['num_heads'\]=4"),
        ({"overrides": {"layer_types": []}}, "set the option layer_types"),
        ({"overrides": {"num_attention_heads": 3}}, "num_attention_heads=3"),
    ],
)
def test_bad_options_are_named(target_config, options, message):
    with pytest.raises(ValueError, match=message):
        build_draft_config(target_config, **{"num_layers": 2, "mask_token_id": 3, **options})


def test_layer_ids_of_a_tiny_target_must_be_given():
    with pytest.raises(ValueError, match="target_layer_ids"):
        default_target_layer_ids(4, 5)
    check_target_layer_ids([0, 1, 3], 4)


def test_a_nested_target_with_two_thetas_and_two_head_sizes():
    target = Gemma4Config(text_config={"num_hidden_layers": 8, "vocab_size": 512})
    config = build_draft_config(target, num_layers=2, mask_token_id=3)
    text = target.get_text_config()
    assert config.hidden_size == text.hidden_size
    assert config.rope_parameters["rope_theta"] == text.rope_parameters["full_attention"]["rope_theta"]


def test_a_target_with_other_field_names():
    target = GPT2Config(n_embd=32, n_head=4, n_layer=8, vocab_size=96)
    with pytest.raises(ValueError, match="intermediate_size"):
        build_draft_config(target, num_layers=2, mask_token_id=3)
    config = build_draft_config(target, num_layers=2, mask_token_id=3, overrides={"intermediate_size": 128})
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (32, 4, 8)


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]}},
    ],
)
def test_what_the_drafter_would_not_follow_is_refused(overrides):
    with pytest.raises(ValueError, match=r"overrides: (hidden_act='gelu'|rope_type='(dynamic|longrope)') is not"):
        build_draft_config(Qwen3Config(num_hidden_layers=8), num_layers=2, mask_token_id=3, overrides=overrides)
    plain = build_draft_config(Qwen3Config(num_hidden_layers=8), num_layers=2, mask_token_id=3)
    for name, value in overrides.items():
        setattr(plain, name, value)
    with pytest.raises(ValueError, match=r"config\.json: (hidden_act|rope_type)="):
        check_supported(plain, "config.json")
