"""Parity with other implementations, see tests/reference/README.md for tensors and tolerances."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from dflash_lightning.batch import HiddenStateBatch
from dflash_lightning.drafter.attention import dense_mask
from dflash_lightning.drafter.context import DraftContext
from dflash_lightning.drafter.layout import make_block_layout
from dflash_lightning.drafter.metrics import DrafterMetrics, accepted_lengths
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.objective import LMHead, Objective

ANCHORS = [10, 17, 22, 30, 40]


def reference_batch(reference, input_ids=None) -> HiddenStateBatch:
    ids = reference["inputs/input_ids"][0] if input_ids is None else input_ids
    loss_mask = reference["inputs/loss_mask"][0].bool()
    anchors = torch.tensor(ANCHORS)
    token = anchors[:, None] + torch.arange(4)
    mask = loss_mask[token].cumprod(1).bool()
    mask[:, 0] = False
    slots = mask.flatten().nonzero()[:, 0]
    return HiddenStateBatch(
        input_ids=ids,
        hidden_states=reference["inputs/hidden_states"][0],
        loss_mask=loss_mask,
        document_ids=torch.zeros(48, dtype=torch.int64),
        positions=torch.arange(48),
        anchors=anchors,
        anchor_valid=torch.ones(5, dtype=torch.bool),
        labels=ids[token],
        label_mask=mask,
        slot_index=torch.cat([slots, torch.full((256 - len(slots),), -1)]),
    )


def reference_drafter(reference, **fields) -> DFlashDraftModel:
    model = DFlashDraftModel(Qwen3Config(**{**reference["json"]["hf_config"], **fields}))
    model.load_state_dict({k.removeprefix("weights/"): v for k, v in reference.items() if k.startswith("weights/")})
    return model


def block_embeddings(reference, batch) -> torch.Tensor:
    tokens = torch.full_like(batch.labels, 319)
    # The anchors' tokens come from the reference ids, also where a case has labels of its own.
    tokens[:, 0] = reference["inputs/input_ids"][0][batch.anchors]
    return reference["frozen/embed_tokens.weight"][tokens]


def head(reference) -> LMHead:
    return LMHead(reference["frozen/lm_head.weight"])


def test_context_feature(reference):
    features = reference_drafter(reference).context_features(reference["inputs/hidden_states"][0])
    torch.testing.assert_close(features, reference["inference/context_feature"][0], atol=1e-5, rtol=0)


def test_inference_blocks(reference):
    model = reference_drafter(reference)
    for number, anchor in enumerate([10, 17, 40]):
        tokens = torch.tensor([reference["inputs/input_ids"][0, anchor], 319, 319, 319])
        context = DraftContext(1)
        model.extend_context(context, reference["inputs/hidden_states"][:, :anchor], [anchor])
        hidden = model.decode_blocks(reference["frozen/embed_tokens.weight"][tokens][None], context)[0]
        torch.testing.assert_close(hidden, reference["inference/hidden"][number], atol=1e-5, rtol=0)
        logits = head(reference).logits(hidden[1:])
        torch.testing.assert_close(logits, reference["inference/logits"][number], atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", ["blockwise", "sdpa"])
@pytest.mark.parametrize(
    ("case", "objective"),
    [
        ("A_gamma7", Objective(gamma=7.0)),
        ("A_no_decay", Objective(gamma=None)),
        ("A_dpace", Objective(weights="dpace", alpha=0.5)),
    ],
)
def test_training_step(reference, attention, case, objective):
    model, batch = reference_drafter(reference), reference_batch(reference)
    hidden = model(
        block_embeddings(reference, batch), batch.hidden_states, make_block_layout(batch), attention=attention
    )
    torch.testing.assert_close(hidden, reference[f"train_{case}/output_hidden"], atol=1e-5, rtol=0)

    out = objective(hidden, batch, head(reference))
    expected = reference["json"]["training"][case]
    assert out.numerator.item() == pytest.approx(expected["loss_num"], rel=1e-6)
    assert out.denominator.item() == pytest.approx(expected["loss_den"], rel=1e-6)
    assert out.correct.sum() == expected["accuracy"] * expected["accuracy_denom"]
    assert batch.label_mask.sum() == expected["accuracy_denom"]

    (out.numerator / out.denominator).backward()
    for name, parameter in model.named_parameters():
        gradient = reference[f"train_{case}/grads/{name}"]
        atol = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(parameter.grad, gradient, atol=atol, rtol=0, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("attention", ["blockwise", "sdpa", "flex"])
def test_full_and_sliding_layers_forward(reference, attention):
    batch = reference_batch(reference)
    sliding = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    for case, fields in {"A_gamma7": {}, "A_sliding_window_8": sliding}.items():
        model = reference_drafter(reference, **fields)
        with torch.no_grad():
            hidden = model(
                block_embeddings(reference, batch), batch.hidden_states, make_block_layout(batch), attention=attention
            )
            out = Objective(gamma=7.0)(hidden, batch, head(reference))
        torch.testing.assert_close(hidden, reference[f"train_{case}/output_hidden"], atol=1e-5, rtol=0)
        loss = out.numerator / out.denominator
        assert loss.item() == pytest.approx(reference["json"]["training"][case]["loss"], rel=1e-6)


def test_masks(reference):
    layout = make_block_layout(reference_batch(reference))
    assert torch.equal(dense_mask(layout, None, False), reference["masks/full"])
    assert torch.equal(dense_mask(layout, 8, True), reference["masks/sliding_window_8"])


def test_accuracy_case(reference):
    batch = reference_batch(reference, reference["accuracy_case/input_ids"][0])
    hidden = reference["train_A_gamma7/output_hidden"]
    out = Objective()(hidden, batch, head(reference))
    metrics = DrafterMetrics(4)
    metrics.update(out.numerator, out.denominator, out.correct, batch.label_mask)
    expected = reference["json"]["accuracy_case"]
    runs = accepted_lengths(out.correct, batch.label_mask) - 1
    assert runs.tolist() == expected["accepted_run_per_block"]
    assert metrics.compute()["accuracy"].item() == pytest.approx(expected["accuracy"])
    assert metrics.compute()["acceptance_length"].item() == expected["mean_accept_length_with_bonus"]
