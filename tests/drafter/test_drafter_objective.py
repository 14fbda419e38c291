"""Losses, weights and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from dflash_lightning.drafter.layout import make_block_layout
from dflash_lightning.drafter.objective import (
    LMHead,
    Objective,
    decay_weights,
    dpace_weights,
    head_losses,
    linear_cross_entropy,
)

ROWS, HIDDEN, VOCAB = 21, 12, 37


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    weights = torch.rand(ROWS, generator=generator)
    weights[-5:] = 0
    return hidden, weight, labels, weights


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0, "bias": True}]
)
@pytest.mark.parametrize("chunk_size", [4, 64, None])
def test_cross_entropy_equals_autograd(rows, options, chunk_size):
    hidden, weight, labels, weights = rows
    options = dict(options)
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) if options.pop("bias", False) else None
    loss, correct, nll = linear_cross_entropy(
        hidden, weight, labels, weights, bias=bias, chunk_size=chunk_size, **options
    )
    (gradient,) = torch.autograd.grad(3 * loss, hidden)

    logits = torch.nn.functional.linear(hidden, weight, bias) * options.get("scale", 1.0)
    if softcap := options.get("softcap"):
        logits = softcap * torch.tanh(logits / softcap)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (expected_gradient,) = torch.autograd.grad(3 * (weights * expected).sum(), hidden)
    torch.testing.assert_close(nll, expected)
    torch.testing.assert_close(loss, (weights * expected).sum())
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
    assert not gradient[-5:].any()
    padded, _, _ = linear_cross_entropy(
        hidden, weight, torch.where(weights > 0, labels, -1), weights, bias=bias, **options
    )
    torch.testing.assert_close(padded, loss)
    assert torch.equal(correct, logits.argmax(1) == labels)


def test_cross_entropy_of_extreme_logits_is_exact(rows):
    hidden, weight, labels, _ = rows
    logits = (hidden * 300) @ weight.T
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    _, _, nll = linear_cross_entropy(hidden * 300, weight, labels, torch.ones(ROWS))
    assert expected.max() > 1000
    torch.testing.assert_close(nll, expected)


def test_bf16_head_accumulates_in_fp32(rows):
    hidden, weight, labels, weights = rows
    loss, _, nll = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, weights)
    assert loss.dtype == nll.dtype == torch.float32
    exact, _, _ = linear_cross_entropy(hidden, weight, labels, weights)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.dtype == torch.float32


def reference_losses(z, target_z):
    """The textbook forms, for autograd."""
    log_q, log_p = z.log_softmax(1), target_z.log_softmax(1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(1)
    kl, tv = (p * (log_p - log_q)).sum(1), 0.5 * (p - q).abs().sum(1)
    mix = torch.exp(-3 * alpha).detach()
    return {
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(1),
        "tv": tv,
        "nla": -alpha.log(),
        "lk": mix * kl + (1 - mix) * tv,
    }


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv", "nla", "lk"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_losses_from_the_target_equal_autograd(rows, name, softcap):
    hidden, weight, labels, weights = rows
    target_hidden = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2))
    head = LMHead(weight, softcap=softcap)
    terms = {"ce": 0.3, name: 0.7}
    loss, nll, _ = head_losses(hidden, head, labels, terms=terms, target_hidden_MH=target_hidden, chunk_size=8)
    (gradient,) = torch.autograd.grad((weights * loss).sum(), hidden)

    z, target_z = hidden @ weight.T, target_hidden @ weight.T
    if softcap:
        z, target_z = (softcap * torch.tanh(x / softcap) for x in (z, target_z))
    ce = torch.nn.functional.cross_entropy(z, labels, reduction="none")
    expected = 0.3 * ce + 0.7 * reference_losses(z, target_z)[name]
    (expected_gradient,) = torch.autograd.grad((weights * expected).sum(), hidden)
    torch.testing.assert_close(nll, ce)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


def test_without_gradient_only_the_values_are_made(rows):
    hidden, weight, labels, weights = rows
    with torch.no_grad():
        loss, _, _ = linear_cross_entropy(hidden, weight, labels, weights)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, labels, weights)[0].detach())


def test_weights_by_hand():
    torch.testing.assert_close(decay_weights(4, 2.0), torch.tensor([0, 1, math.exp(-0.5), math.exp(-1)]))
    assert decay_weights(4, None).tolist() == [0, 1, 1, 1]
    probs = torch.tensor([[1.0, 0.5, 0.25, 1.0, 0.1]])
    mask = torch.tensor([[False, True, True, True, False]])
    # s = 0.75, 0.625, 1 -> c = 0.75, 0.46875, 0.46875; w_k sums c from k on.
    expected = torch.tensor([[0, 1.6875, 0.9375, 0.46875, 0]])
    torch.testing.assert_close(dpace_weights(probs, mask, 0.5), expected)


def test_a03_slot_zero_has_no_weight(make_batch):
    batch = make_batch([30], anchors=[4, 9])
    hidden = torch.randn(2, 4, 32, requires_grad=True)
    for objective in (Objective(), Objective(weights="dpace")):
        out = objective(hidden, batch, LMHead(torch.randn(96, 32)))
        (gradient,) = torch.autograd.grad(out.numerator, hidden)
        assert not gradient[:, 0].any()
        assert gradient[:, 1:].abs().sum(-1).all()


@pytest.mark.parametrize("objective", [Objective(gamma=2.0), Objective(weights="dpace")])
def test_a08_a_split_batch_gives_the_same_gradient(objective, make_batch, make_drafter, embed_blocks):
    model, head = make_drafter(), LMHead(torch.randn(96, 32, generator=torch.Generator().manual_seed(3)))
    lengths, supervised = [9, 9, 12, 12], [*[range(5, 7)] * 2, *[range(4, 9)] * 2]  # 1, 1, 4 and 4 labels to predict
    starts = [0, 9, 18, 30]
    positions = [starts[i] + p for i in range(4) for p in supervised[i]]
    whole = make_batch(lengths, supervised=positions)

    def part(documents):
        keep = torch.isin(whole.document_ids, torch.tensor(documents))
        offset = int(keep.nonzero()[0])
        inside = [p - offset for p in positions if keep[p]]
        batch = make_batch([lengths[i] for i in documents], supervised=inside)
        batch.input_ids, batch.hidden_states = whole.input_ids[keep], whole.hidden_states[keep]
        token = (batch.anchors[:, None] + torch.arange(4)).clamp(max=int(keep.sum()) - 1)
        batch.labels = torch.where(batch.label_mask, batch.input_ids[token], 0)
        return batch

    results = []
    for batches in ([whole], [part([0, 1]), part([2, 3])], [part([0]), part([1]), part([2, 3])]):
        model.zero_grad()
        denominator = torch.zeros(())
        for batch in batches:
            hidden = model(embed_blocks(batch), batch.hidden_states, make_block_layout(batch))
            out = objective(hidden, batch, head)
            out.numerator.backward()
            denominator += out.denominator
        results.append([p.grad / denominator for p in model.parameters()])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(two, one, atol=1e-6 * one.abs().max().item() + 1e-9, rtol=1e-5)


def test_a11_the_target_distribution_is_the_targets_own(make_batch, target_config):
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(target_config).eval()
    torch.nn.init.normal_(target.model.norm.weight, mean=1.0, std=0.5)
    torch.nn.init.normal_(target.lm_head.weight, std=0.3)
    batch = make_batch([30, 20])
    last = {}
    # What the last decoder layer gives, before the final norm.
    handle = target.model.layers[-1].register_forward_hook(lambda module, args, out: last.update(state=out))
    logits = []
    states = []
    with torch.no_grad():
        for document in range(2):
            ids = batch.input_ids[batch.document_ids == document]
            logits.append(target(ids[None]).logits[0])
            states.append((last["state"][0] if isinstance(last["state"], tuple) else last["state"])[0])
    handle.remove()
    batch.last_hidden_state = torch.cat(states)
    head = LMHead(target.lm_head.weight.detach(), final_norm=target.model.norm)
    # A drafter whose slot k already holds the target's normed state at anchor + k - 1 has the target's distribution.
    token = (batch.anchors[:, None] + torch.arange(4) - 1).clamp(0, 49)
    hidden = target.model.norm(batch.last_hidden_state[token]).detach()
    out = Objective("kl", gamma=None)(hidden, batch, head)
    assert abs(out.numerator.item()) < 1e-5 * out.denominator.item()
    ce = Objective("ce", gamma=None)(hidden, batch, head)
    predicted = torch.cat(logits)[token][batch.label_mask]
    expected = torch.nn.functional.cross_entropy(predicted, batch.labels[batch.label_mask], reduction="sum")
    assert ce.numerator.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "loss='mse'"),
        ({"loss": {}}, "loss={}"),
        ({"weights": "linear"}, "weights='linear'"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"weights": "dpace", "alpha": 1.5}, "alpha=1.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(**options)


def test_a_missing_last_state_is_named(make_batch):
    batch = make_batch([20])
    batch.last_hidden_state = None
    assert Objective("kl").needs_target
    assert not Objective("ce").needs_target
    with pytest.raises(ValueError, match="last hidden state"):
        Objective("kl")(torch.zeros(64, 4, 32), batch, LMHead(torch.zeros(96, 32)))
