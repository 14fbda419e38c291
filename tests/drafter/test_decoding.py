"""Speculative decoding: what it accepts, and that its output is the target's own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_lightning.drafter.config import build_draft_config, mask_token_id, target_layer_ids
from dflash_lightning.drafter.decoding import (
    Decoded,
    SamplingOptions,
    decode_plain,
    decode_speculative,
    first_difference,
)
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.target.decode import TargetDecoder
from dflash_lightning.target.loading import FrozenHead

VOCAB, MASK = 24, 23


class ScriptedTarget:
    """Says `script` whatever it is asked; its states carry the token's position."""

    def __init__(self, script: list[int], prompt_length: int) -> None:
        self.script, self.prompt_length = script, prompt_length
        self.reset()

    def reset(self) -> None:
        self.length = 0

    def step(self, ids, *, last_only=False):
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        logits = torch.full((len(ids), VOCAB), -5.0)
        for row, position in enumerate(positions.tolist()):
            index = position - self.prompt_length + 1
            if 0 <= index < len(self.script):
                logits[row, self.script[index]] = 5.0
        hidden = positions[:, None].float().expand(-1, 64) / 100
        return (logits[-1:] if last_only else logits), hidden

    def drop(self, count: int) -> None:
        self.length -= count


@pytest.fixture
def drafter() -> DFlashDraftModel:
    torch.manual_seed(0)
    target = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return DFlashDraftModel(build_draft_config(target, num_layers=2, block_size=4, mask_token_id=MASK)).eval()


def oracle_head(target: ScriptedTarget):
    """Logits of the script's own tokens for the slots 1..K-1 of the block that starts at the last verified token."""

    def head(hidden_KH: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(hidden_KH), VOCAB), -5.0)
        first = target.length - target.prompt_length + 1
        for k in range(len(hidden_KH)):
            if first + k < len(target.script):
                logits[k, target.script[first + k]] = 5.0
        return logits

    return head


def test_a03_an_oracle_head_gains_a_whole_block_a_forward(drafter: DFlashDraftModel) -> None:
    target = ScriptedTarget([5, 6, 7, 8, 9, 10, 11, 12, 13], prompt_length=3)
    embed = torch.nn.Embedding(VOCAB, 32)
    options = SamplingOptions(9)
    out = decode_speculative(target, drafter, embed, oracle_head(target), [1, 2, 3], options)
    assert out.tokens == target.script
    assert out.gained == [4, 4], "three drafted tokens and the bonus"
    assert out.acceptance_length == 4.0


def test_a12_a_generated_mask_token_is_kept(drafter: DFlashDraftModel) -> None:
    script = [5, MASK, 7, MASK, MASK, 9, 10, 11]
    target = ScriptedTarget(script, prompt_length=2)
    embed = torch.nn.Embedding(VOCAB, 32)
    for head in (oracle_head(target), lambda h: torch.zeros(len(h), VOCAB)):
        out = decode_speculative(target, drafter, embed, head, [1, 2], SamplingOptions(len(script)))
        assert out.tokens == script


def test_a_stop_token_ends_the_sequence_inside_a_block(drafter: DFlashDraftModel) -> None:
    target = ScriptedTarget([5, 6, 2, 8, 9], prompt_length=2)
    embed = torch.nn.Embedding(VOCAB, 32)
    options = SamplingOptions(20, stop_ids={2})
    out = decode_speculative(target, drafter, embed, oracle_head(target), [1, 2], options)
    assert out.tokens == [5, 6, 2]
    assert out.gained == [2], "what lies behind the stop token is no gain"
    assert decode_plain(target, [1, 2], options).tokens == [5, 6, 2]


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention", "full_attention"]])
def test_greedy_output_is_the_targets_own(tiny_target: str, layer_types) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    torch.manual_seed(1)
    config = build_draft_config(
        model.config, num_layers=2, block_size=4, mask_token_id=3, layer_types=layer_types, sliding_window=8
    )
    drafter = DFlashDraftModel(config).eval()
    head = FrozenHead.of(model)
    decoder = TargetDecoder(model, target_layer_ids(config))
    for first in range(4, 12):
        prompt = [first, first + 30, first + 60]
        options = SamplingOptions(24, stop_ids={2})
        plain = decode_plain(decoder, prompt, options)
        drafted = decode_speculative(decoder, drafter, head.embedding, head.lm_head, prompt, options)
        assert first_difference(plain, drafted) is None
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0
        )[0, 3:].tolist()
        assert plain.tokens == expected


def test_decoding_drafts_what_training_sees(tiny_target: str) -> None:
    """The drafter's states in a decode loop equal those of one training pass over the finished sequence."""
    from dflash_lightning.batch import HiddenStateBatch
    from dflash_lightning.drafter.layout import make_block_layout

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    torch.manual_seed(1)
    config = build_draft_config(model.config, num_layers=2, block_size=4, mask_token_id=3)
    drafter, head = DFlashDraftModel(config).eval(), FrozenHead.of(model)
    decoder = TargetDecoder(model, target_layer_ids(config))
    seen: list[torch.Tensor] = []

    def record(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.clone())
        return head.lm_head(hidden)

    prompt = [10, 20, 30, 40]
    out = decode_speculative(decoder, drafter, head.embedding, record, prompt, SamplingOptions(16))
    anchors = [len(prompt)]
    for count in out.gained[:-1]:
        anchors.append(anchors[-1] + count)
    tokens = torch.tensor([*prompt, *out.tokens])
    decoder.reset()
    _, hidden = decoder.step(tokens.tolist())
    n = len(anchors)
    batch = HiddenStateBatch(
        input_ids=tokens, hidden_states=hidden, loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        document_ids=torch.zeros(len(tokens), dtype=torch.int64), positions=torch.arange(len(tokens)),
        anchors=torch.tensor(anchors), anchor_valid=torch.ones(n, dtype=torch.bool),
        labels=torch.zeros(n, 4, dtype=torch.int64), label_mask=torch.zeros(n, 4, dtype=torch.bool),
        slot_index=torch.full((256,), -1),
    )  # fmt: skip
    block_ids = torch.full((n, 4), mask_token_id(config))
    block_ids[:, 0] = tokens[batch.anchors]
    with torch.no_grad():
        states = drafter(head.embedding(block_ids), hidden, make_block_layout(batch))
    for i in range(n):
        torch.testing.assert_close(states[i, 1:], seen[i], atol=1e-4, rtol=1e-4)


def test_sampled_output_follows_the_targets_distribution(drafter: DFlashDraftModel) -> None:
    """Chi-square of the first three tokens against a target with fixed conditional distributions."""
    generator = torch.Generator().manual_seed(0)
    small = 4
    table = torch.randn(small, small, generator=generator) * 1.5

    class Markov(ScriptedTarget):
        def step(self, ids, *, last_only=False):
            self.length += len(ids)
            logits = torch.full((len(ids), VOCAB), -1e9)
            logits[:, :small] = table[torch.tensor(ids).clamp(max=small - 1)]
            return (logits[-1:] if last_only else logits), torch.zeros(len(ids), 64)

    draft_logits = torch.full((3, VOCAB), -1e9)
    draft_logits[:, :small] = torch.tensor([0.5, -0.5, 1.0, 0.0])
    target, embed = Markov([], 1), torch.nn.Embedding(VOCAB, 32)
    options = SamplingOptions(3, temperature=1.0)
    draws = 1500
    counts = torch.zeros(small, small, small)
    for _ in range(draws):
        out = decode_speculative(target, drafter, embed, lambda h: draft_logits[: len(h)], [0], options, generator)
        counts[tuple(out.tokens)] += 1
    p = torch.softmax(table, -1)
    expected = draws * p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 103.4, "0.1 % point of chi-square with 63 degrees of freedom"


def test_near_ties_are_no_difference() -> None:
    plain = Decoded([1, 2, 3], 0.0, gaps=[1.0, 1e-5, 1.0])
    assert first_difference(plain, Decoded([1, 9, 9], 0.0)) is None
    assert first_difference(plain, Decoded([1, 2, 9], 0.0)) == (2, 1.0)
    assert first_difference(plain, Decoded([1, 2], 0.0)) == (2, float("inf"))


def test_targets_with_a_running_state_are_refused_by_name() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM.*linear_attention"):
        TargetDecoder(Qwen3_5ForCausalLM(config), [1])
