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
    """Each row says its script whatever it is asked; its states carry the token's position."""

    def __init__(self, scripts: list[list[int]], prompts: list[list[int]]) -> None:
        self.scripts, self.prompt_lengths = scripts, [len(prompt) for prompt in prompts]
        self.reset()

    def reset(self) -> None:
        self.rows = list(range(len(self.scripts)))
        self.lengths = [0] * len(self.rows)

    def said(self, row: int) -> int:
        """Tokens of the row's script that its text holds."""
        return self.lengths[row] - self.prompt_lengths[row]

    def step(self, ids, *, last_only=False):
        width = max(map(len, ids))
        logits = torch.full((len(ids), width, VOCAB), -5.0)
        hidden = torch.zeros(len(ids), width, 64)
        for place, (row, new) in enumerate(zip(self.rows, ids, strict=True)):
            for i in range(len(new)):
                index, slot = self.said(row) + 1, width - len(new) + i
                hidden[place, slot] = self.lengths[row] / 100
                if 0 <= index < len(self.scripts[row]):
                    logits[place, slot, self.scripts[row][index]] = 5.0
                self.lengths[row] += 1
        return (logits[:, -1:] if last_only else logits), hidden

    def retain(self, rows, drop) -> None:
        self.rows = [self.rows[place] for place in rows]
        for row, count in zip(self.rows, drop, strict=True):
            self.lengths[row] -= count


@pytest.fixture
def drafter() -> DFlashDraftModel:
    torch.manual_seed(0)
    target = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return DFlashDraftModel(build_draft_config(target, num_layers=2, block_size=4, mask_token_id=MASK)).eval()


def oracle_head(target: ScriptedTarget, right: dict[int, int] | None = None):
    """Logits of the script's own tokens for the slots 1..K-1 of each row's block, of row r for the first right[r]."""

    def head(hidden_BDH: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*hidden_BDH.shape[:2], VOCAB), -5.0)
        for place, row in enumerate(target.rows):
            script, first = target.scripts[row], target.said(row) + 1
            for k in range(min(hidden_BDH.shape[1], (right or {}).get(row, 99))):
                if first + k < len(script):
                    logits[place, k, script[first + k]] = 5.0
        return logits

    return head


def decode_scripts(drafter, scripts, prompts, options, right=None, **more) -> list[Decoded]:
    target, embed = ScriptedTarget(scripts, prompts), torch.nn.Embedding(VOCAB, 32)
    return decode_speculative(target, drafter, embed, oracle_head(target, right), prompts, options, **more)


def test_a03_an_oracle_head_gains_a_whole_block_a_forward(drafter: DFlashDraftModel) -> None:
    script = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    (out,) = decode_scripts(drafter, [script], [[1, 2, 3]], SamplingOptions(9))
    assert out.tokens == script
    assert out.gained == [4, 4], "three drafted tokens and the bonus"
    assert out.acceptance_length == 4.0


def test_every_row_gains_what_its_own_drafts_earn(drafter: DFlashDraftModel) -> None:
    """Three rows that accept 0, 1 and all drafts and end at different times: the last decodes alone."""
    scripts = [[5 + (row + i) % 15 for i in range(9)] for row in range(3)]
    heard: list[tuple[int, list[int]]] = []
    outs = decode_scripts(
        drafter, scripts, [[1], [1, 2, 3, 4], [1, 2]], SamplingOptions(9), right={0: 0, 1: 1},
        on_tokens=lambda row, tokens: heard.append((row, tokens)),
    )  # fmt: skip
    assert [out.tokens for out in outs] == scripts
    assert [out.gained for out in outs] == [[1] * 8, [2] * 4, [4, 4]]
    assert [tokens for row, tokens in heard if row == 2] == [scripts[2][:1], scripts[2][1:5], scripts[2][5:]]
    assert [t for row, tokens in heard if row == 1 for t in tokens] == scripts[1]


def test_fewer_drafted_tokens_a_row(drafter: DFlashDraftModel) -> None:
    scripts = [[5, 6, 7, 8, 9, 10, 11], [15, 16, 17, 18, 19, 20, 21]]
    options = SamplingOptions(7)
    outs = decode_scripts(drafter, scripts, [[1], [1, 2]], options, right={1: 1}, num_speculative_tokens=2)
    assert [out.gained for out in outs] == [[3, 3], [2, 2, 2]]


def test_a12_a_generated_mask_token_is_kept(drafter: DFlashDraftModel) -> None:
    script = [5, MASK, 7, MASK, MASK, 9, 10, 11]
    for right in (3, 0):
        (out,) = decode_scripts(drafter, [script], [[1, 2]], SamplingOptions(len(script)), right={0: right})
        assert out.tokens == script


def test_a_stop_token_ends_a_row_inside_a_block(drafter: DFlashDraftModel) -> None:
    scripts, prompts = [[5, 6, 2, 8, 9], [2, 5, 5], [5, 6, 7, 8, 9, 10, 11]], [[1, 2], [1], [1, 2, 3]]
    options = SamplingOptions(6, stop_ids={2})
    outs = decode_scripts(drafter, scripts, prompts, options)
    assert [out.tokens for out in outs] == [[5, 6, 2], [2], [5, 6, 7, 8, 9, 10]]
    assert [out.gained for out in outs] == [[2], [], [4, 4]], "what lies behind the stop token is no gain"
    plain = decode_plain(ScriptedTarget(scripts, prompts), prompts, options)
    assert [out.tokens for out in plain] == [out.tokens for out in outs]
    assert [len(out.gaps) for out in plain] == [3, 1, 6]


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
    prompts = [[first, first + 30, first + 60] for first in range(4, 12)]
    options = SamplingOptions(24, stop_ids={2})
    for prompt in prompts:
        (plain,) = decode_plain(decoder, [prompt], options)
        (drafted,) = decode_speculative(decoder, drafter, head.embedding, head.lm_head, [prompt], options)
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
        seen.append(hidden[0].clone())
        return head.lm_head(hidden)

    prompt = [10, 20, 30, 40]
    (out,) = decode_speculative(decoder, drafter, head.embedding, record, [prompt], SamplingOptions(16))
    anchors = [len(prompt)]
    for count in out.gained[:-1]:
        anchors.append(anchors[-1] + count)
    tokens = torch.tensor([*prompt, *out.tokens])
    decoder.reset()
    _, (hidden,) = decoder.step([tokens.tolist()])
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


class Markov:
    """The next token depends on the last alone, by a fixed table; knows no rows."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def reset(self) -> None: ...

    def retain(self, rows, drop) -> None: ...

    def step(self, ids, *, last_only=False):
        small, width = len(self.table), max(map(len, ids))
        logits = torch.full((len(ids), width, VOCAB), -1e9)
        for place, new in enumerate(ids):
            logits[place, width - len(new) :, :small] = self.table[torch.tensor(new).clamp(max=small - 1)]
        return (logits[:, -1:] if last_only else logits), torch.zeros(len(ids), width, 64)


def markov(small: int = 4) -> tuple[Markov, torch.Tensor]:
    """A target, and the logits [D, V] that a bad drafter would give for it."""
    table = torch.randn(small, small, generator=torch.Generator().manual_seed(0)) * 1.5
    draft_logits = torch.full((3, VOCAB), -1e9)
    draft_logits[:, :small] = torch.tensor([0.5, -0.5, 1.0, 0.0])
    return Markov(table), draft_logits


def test_sampled_output_follows_the_targets_distribution(drafter: DFlashDraftModel) -> None:
    """Chi-square of the first three tokens against a target with fixed conditional distributions, 30 rows together."""
    target, draft_logits = markov()
    small, embed = len(target.table), torch.nn.Embedding(VOCAB, 32)
    draws, rows = 1500, 30
    counts = torch.zeros(small, small, small)
    for first in range(0, draws, rows):
        generators = [torch.Generator().manual_seed(first + row) for row in range(rows)]
        outs = decode_speculative(
            target, drafter, embed, lambda h: draft_logits.expand(len(h), -1, -1), [[0]] * rows,
            SamplingOptions(3, temperature=1.0), generators,
        )  # fmt: skip
        for out in outs:
            counts[tuple(out.tokens)] += 1
    p = torch.softmax(target.table, -1)
    expected = draws * p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 103.4, "0.1 % point of chi-square with 63 degrees of freedom"


@pytest.mark.parametrize("speculative", [True, False])
def test_what_is_drawn_for_a_row_does_not_depend_on_its_neighbours(drafter: DFlashDraftModel, speculative) -> None:
    target, draft_logits = markov()
    embed, options = torch.nn.Embedding(VOCAB, 32), SamplingOptions(20, temperature=1.0, stop_ids={3})

    def decode(rows: list[int]) -> list[list[int]]:
        prompts = [[0] * (1 + row) for row in rows]
        generators = [torch.Generator().manual_seed(row) for row in rows]
        if not speculative:
            return [out.tokens for out in decode_plain(target, prompts, options, generators)]
        outs = decode_speculative(
            target, drafter, embed, lambda h: draft_logits.expand(len(h), -1, -1), prompts, options, generators
        )
        return [out.tokens for out in outs]

    alone = {row: decode([row])[0] for row in range(6)}
    assert len({tuple(tokens) for tokens in alone.values()}) > 3
    for rows in ([0, 1, 2, 3, 4, 5], [5, 2], [3, 4, 1]):
        assert decode(rows) == [alone[row] for row in rows]


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


def test_a_target_that_keeps_its_state_elsewhere_is_refused():
    import transformers as tf

    rwkv = tf.RwkvForCausalLM(tf.RwkvConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2))
    hybrid = tf.FalconH1ForCausalLM(
        tf.FalconH1Config(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, mamba_d_ssm=32, mamba_n_heads=2,
        )
    )  # fmt: skip
    for model in (rwkv, hybrid):
        with pytest.raises(ValueError, match=rf"{type(model).__name__}: it keeps a running state"):
            TargetDecoder(model, [1])
