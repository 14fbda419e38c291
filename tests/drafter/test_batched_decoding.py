"""Prompts decoded together with real (small, random) targets: every row as if it were alone."""

from __future__ import annotations

import time

import pytest
import torch

from dflash_lightning.drafter.config import build_draft_config, target_layer_ids
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
from tests.target.test_target_decode import small_model

VOCAB, MASK, K = 96, 95, 5
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
PROMPTS = [[7, 8], [11, 3, 5, 9, 20, 31, 44, 60, 2, 17, 18, 19], [50, 51, 52, 53, 54], [50, 51, 52, 53, 55]]


class Informed:
    """An LM head that drafts a row's next tokens right, now fewer and now more, and keeps the drafter's states."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.taken = [0] * len(answers)
        self.states: dict[tuple[int, int], torch.Tensor] = {}

    def hear(self, row: int, tokens: list[int]) -> None:
        self.taken[row] += len(tokens)

    def __call__(self, hidden_BDH: torch.Tensor) -> torch.Tensor:
        going = [row for row, answer in enumerate(self.answers) if self.taken[row] < len(answer)]
        logits = torch.zeros(*hidden_BDH.shape[:2], VOCAB)
        for place, row in enumerate(going):
            taken, answer = self.taken[row], self.answers[row]
            self.states[row, taken] = hidden_BDH[place].clone()
            for k in range((row + taken) % K):
                if taken + k < len(answer):
                    logits[place, k, answer[taken + k]] = 1.0
        return logits


def decode(model, decoder, drafter, prompts, options, answers) -> tuple[list[Decoded], Informed]:
    informed = Informed(answers)
    embed = FrozenHead.of(model).embedding
    outs = decode_speculative(decoder, drafter, embed, informed, prompts, options, on_tokens=informed.hear)
    return outs, informed


@pytest.mark.parametrize(
    ("family", "draft_options"),
    [
        ("llama", {}),
        ("llama", SLIDING),
        ("qwen3", {"sliding_causal": False, **SLIDING}),
        ("mistral-sliding", SLIDING),
        ("qwen3-sliding", {}),
        ("gemma3-sliding", {}),
    ],
)
def test_rows_decoded_together_equal_rows_decoded_alone(family: str, draft_options: dict) -> None:
    model = small_model(family)
    config = build_draft_config(model.config, num_layers=2, block_size=K, mask_token_id=MASK, **draft_options)
    torch.manual_seed(1)
    drafter = DFlashDraftModel(config).eval()
    decoder = TargetDecoder(model, target_layer_ids(config))
    length = 24
    free = [out.tokens for out in decode_plain(decoder, PROMPTS, SamplingOptions(length))]
    # A token that ends the third row early, and perhaps others.
    options = SamplingOptions(length, stop_ids={free[2][9]})
    plain = decode_plain(decoder, PROMPTS, options)
    for prompt, out in zip(PROMPTS, plain, strict=True):
        (alone,) = decode_plain(decoder, [prompt], options)
        assert first_difference(alone, out) is None
        stop = next(iter(options.stop_ids))
        own = model.generate(
            torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=stop, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert alone.tokens == own

    answers = [out.tokens for out in plain]
    together, seen = decode(model, decoder, drafter, PROMPTS, options, answers)
    assert len({len(answer) for answer in answers}) > 1, "rows must end at different times"
    assert {gain for out in together for gain in out.gained} >= {1, 2, 3, 4}, "rows must accept differently"
    assert [first_difference(*pair) for pair in zip(plain, together, strict=True)] == [None] * len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        shifted = [answers[row] if r == row else [] for r in range(len(PROMPTS))]
        informed = Informed(shifted)
        (alone,) = decode_speculative(
            decoder, drafter, FrozenHead.of(model).embedding, informed, [prompt], options,
            on_tokens=lambda _, tokens, informed=informed, row=row: informed.hear(row, tokens),
        )  # fmt: skip
        assert alone.gained == together[row].gained
        own = {place: states for place, states in seen.states.items() if place[0] == row}
        assert own.keys() == informed.states.keys()
        for place, states in own.items():
            torch.testing.assert_close(states, informed.states[place], atol=1e-4, rtol=1e-4)


def test_seconds_are_shares_of_the_wall_time() -> None:
    model = small_model("llama")
    decoder = TargetDecoder(model, [1])
    started = time.perf_counter()
    outs = decode_plain(decoder, PROMPTS, SamplingOptions(8))
    wall = time.perf_counter() - started
    assert 0.5 * wall < sum(out.seconds for out in outs) <= wall
