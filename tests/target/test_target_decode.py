"""The target's cache while rows of different lengths take tokens back and leave."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as tf

from dflash_lightning.target.decode import TargetDecoder

VOCAB = 96


def small_model(family: str):
    """Six layers, random; windows and chunks of 6 tokens, shorter than the rows."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3,
    }  # fmt: skip
    layers = ["sliding_attention", "full_attention"] * 3
    config = {
        "llama": lambda: tf.LlamaConfig(**sizes),
        "qwen3": lambda: tf.Qwen3Config(**sizes),
        "mistral-sliding": lambda: tf.MistralConfig(**sizes, sliding_window=6),
        "qwen3-sliding": lambda: tf.Qwen3Config(
            **sizes, sliding_window=6, use_sliding_window=True, layer_types=layers
        ),
        "gemma3-sliding": lambda: tf.Gemma3TextConfig(**sizes, sliding_window=6, layer_types=layers),
        "llama4-chunked": lambda: tf.Llama4TextConfig(
            **sizes, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=6,
            layer_types=["chunked_attention", "full_attention"] * 3,
        ),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=6, n_head=2, n_positions=128, initializer_range=0.3
        ),
    }[family]()  # fmt: skip
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


FAMILIES = ["llama", "qwen3", "mistral-sliding", "qwen3-sliding", "gemma3-sliding", "llama4-chunked", "gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_what_it_would_be_alone(family: str) -> None:
    """Logits and tapped states after any drafts, rejections and departures equal one forward over the row's text."""
    model = small_model(family)
    decoder = TargetDecoder(model, [1, 4])
    draw = random.Random(0)
    rows = [[draw.randrange(VOCAB) for _ in range(n)] for n in (3, 17, 9, 9)]

    def check(new: int, logits_BSV: torch.Tensor, hidden_BSF: torch.Tensor) -> None:
        for row, logits_SV, hidden_SF in zip(rows, logits_BSV, hidden_BSF, strict=True):
            with torch.inference_mode():
                alone = model(torch.tensor([row]), output_hidden_states=True)
            count = min(new, len(row))
            torch.testing.assert_close(
                logits_SV[-count:], alone.logits[0, -len(logits_SV) :][-count:], atol=1e-4, rtol=1e-4
            )
            states = torch.cat([alone.hidden_states[i + 1][0, -count:] for i in (1, 4)], dim=-1)
            torch.testing.assert_close(hidden_SF[-count:], states, atol=1e-3, rtol=1e-3)

    check(20, *decoder.step(rows, last_only=True))
    for turn in range(8):
        block = [[draw.randrange(VOCAB) for _ in range(4)] for _ in rows]
        rows = [row + new for row, new in zip(rows, block, strict=True)]
        check(4, *decoder.step(block))
        kept = list(range(len(rows)))
        if turn in (3, 5):
            kept.remove(draw.choice(kept))
        # All rows drop as much now and then, as a single row always does.
        drop = [turn % 4] * len(kept) if turn in (2, 6) else [draw.randrange(4) for _ in kept]
        rows = [rows[k][: len(rows[k]) - d] for k, d in zip(kept, drop, strict=True)]
        decoder.retain(kept, drop)
    assert len(rows) == 2


def test_a_target_without_positions_decodes_one_row_at_a_time() -> None:
    config = tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=6, n_head=2)
    decoder = TargetDecoder(tf.BloomForCausalLM(config).eval(), [1])
    decoder.check_batch(1)
    assert decoder.step([[1, 2, 3]])[0].shape == (1, 3, VOCAB)
    with pytest.raises(ValueError, match=r"batch_size=2: BloomForCausalLM takes no position_ids"):
        decoder.check_batch(2)
    decoder.reset()
    with pytest.raises(ValueError, match="position_ids"):
        decoder.step([[1, 2], [3]])
