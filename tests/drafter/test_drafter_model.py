"""The drafter as a module: names, sizes, RoPE, decoding, precision, memory options, host syncs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3RMSNorm

from dflash_lightning.drafter.config import build_draft_config
from dflash_lightning.drafter.context import DraftContext
from dflash_lightning.drafter.layout import make_block_layout
from dflash_lightning.drafter.metrics import DrafterMetrics
from dflash_lightning.drafter.model import DFlashDraftModel, RMSNorm
from dflash_lightning.drafter.objective import LMHead, Objective


def test_names_are_those_of_the_released_checkpoints(make_drafter):
    names = set(make_drafter(num_layers=1, target_layer_ids=[1, 4]).state_dict())
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    expected = ["fc", "hidden_norm", "norm", *[f"layers.0.{name}" for name in layer]]
    assert names == {f"{name}.weight" for name in expected}


def test_size_of_the_qwen36_27b_drafter():
    target = Qwen3Config(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, vocab_size=248320)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        model = DFlashDraftModel(build_draft_config(target, num_layers=5, mask_token_id=248070, overrides=heads))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 1_730_213_120


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_equals_a_qwen3_model_and_survives_a_cast(make_drafter, rope):
    model = make_drafter(overrides={"rope_parameters": rope, "max_position_embeddings": 256})
    positions = torch.arange(256)
    expected = Qwen3Model(model.config).rotary_emb(torch.empty(0), positions[None])
    for found, wanted in zip(model.to(torch.bfloat16)._rotation(positions), expected, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted[0])


def test_norm_and_its_gradient_equal_qwen3():
    torch.manual_seed(0)
    ours, theirs = RMSNorm(16, 1e-6), Qwen3RMSNorm(16, eps=1e-6)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.normal_())
    x, grad = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    results = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        results.append((out, *torch.autograd.grad((out * grad).sum(), (leaf, norm.weight))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    # float32 weights over bf16 states: Qwen3's float32 result, rounded once.
    assert torch.equal(ours(x.bfloat16()), theirs(x.bfloat16()).bfloat16())
    assert torch.equal(ours.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
        {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 4, "sliding_causal": False},
    ],
)
def test_decoding_equals_training(layers, make_batch, make_drafter, embed_blocks):
    """Rows of different lengths side by side, whose contexts come in pieces of which not everything counts."""
    batch, model = make_batch([30, 20], anchors=[0, 12, 33, 47]), make_drafter(**layers)
    embeddings = embed_blocks(batch)
    anchors = batch.anchors.tolist()
    lengths = batch.positions[batch.anchors].tolist()
    own = [batch.hidden_states[a - n : a] for a, n in zip(anchors, lengths, strict=True)]
    with torch.no_grad():
        trained = model(embeddings, batch.hidden_states, make_block_layout(batch))
        context = DraftContext(len(anchors))
        for begin in range(0, max(lengths), 5):
            pieces = [states[begin : begin + 5] for states in own]
            # What lies behind a row's piece is foreign, as the states of rejected tokens are.
            padded = torch.stack([torch.cat([p, torch.full((5 - len(p), own[0].shape[1]), 7.0)]) for p in pieces])
            model.extend_context(context, padded, [len(piece) for piece in pieces])
            model.decode_blocks(embeddings, context)  # a block drafted here leaves nothing behind
        assert context.lengths == lengths
        torch.testing.assert_close(model.decode_blocks(embeddings, context), trained, atol=1e-5, rtol=1e-5)
        context.retain([3, 1])
        decoded = model.decode_blocks(embeddings[[3, 1]], context)
        torch.testing.assert_close(decoded, trained[[3, 1]], atol=1e-5, rtol=1e-5)


def gradients(model, batch, embeddings, **options):
    model.zero_grad()
    model(embeddings, batch.hidden_states, make_block_layout(batch), **options).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradient_checkpointing_changes_nothing(make_batch, make_drafter, embed_blocks):
    batch, model = make_batch([30, 20]), make_drafter()
    plain = gradients(model, batch, embed_blocks(batch))
    model.gradient_checkpointing = True
    calls = []
    handle = model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model, batch, embed_blocks(batch))
    handle.remove()
    assert len(calls) == 2  # once forward, once more for the backward
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=0, rtol=0)


def test_bf16_autocast_keeps_fp32_parameters_and_stays_close(make_batch, make_drafter, embed_blocks):
    batch, model = make_batch([30, 20]), make_drafter()
    embeddings = embed_blocks(batch)
    exact = gradients(model, batch, embeddings)
    batch.hidden_states = batch.hidden_states.bfloat16()
    for attention in ("blockwise", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model, batch, embeddings.bfloat16(), attention=attention)
        for name, gradient in exact.items():
            assert found[name].dtype == torch.float32
            cosine = torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
            assert cosine > 0.99, name


def test_compiled_layers_equal_eager_ones(make_batch, make_drafter, embed_blocks):
    torch._dynamo.reset()
    batch, model = make_batch([30, 20]), make_drafter(num_layers=1, target_layer_ids=[1, 4])
    eager = gradients(model, batch, embed_blocks(batch))
    names = set(model.state_dict())
    model.layers[0].compile(backend="aot_eager")
    compiled = gradients(model, batch, embed_blocks(batch))
    assert set(model.state_dict()) == names
    for name, gradient in eager.items():
        torch.testing.assert_close(compiled[name], gradient, atol=1e-5, rtol=1e-4)


class HostReads(TorchDispatchMode):
    """Counts what would stall a CUDA stream: reading a value, and shapes that depend on data."""

    OPS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.OPS:
            self.found.append(str(func))
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.found.append(f"{func} with a bool index")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["blockwise", "sdpa", "flex"])
@pytest.mark.parametrize("objective", [Objective(), Objective({"ce": 0.5, "lk": 0.5}, weights="dpace")])
def test_a_step_reads_nothing_back(attention, objective, make_batch, make_drafter, embed_blocks):
    batch = make_batch([30, 20])
    model = make_drafter(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    embeddings, metrics = embed_blocks(batch), DrafterMetrics(4)
    head = LMHead(torch.randn(96, 32), final_norm=Qwen3RMSNorm(32))
    with HostReads() as reads:
        layout = make_block_layout(batch)
        # Flex itself cannot run under a dispatch mode on CPU; making its masks is our part of it.
        model.make_masks(layout, attention)
        hidden = model(embeddings, batch.hidden_states, layout, attention=attention.replace("flex", "sdpa"))
        out = objective(hidden, batch, head)
        out.numerator.backward()
        metrics.update(out.numerator, out.denominator, out.correct, batch.label_mask)
        metrics.compute()
    assert reads.found == []


def test_a_batch_without_anchors_is_a_finite_zero(make_batch, make_drafter, embed_blocks):
    batch, model = make_batch([30], supervised=[]), make_drafter()
    for objective in (Objective(), Objective(weights="dpace")):
        model.zero_grad()
        hidden = model(embed_blocks(batch), batch.hidden_states, make_block_layout(batch))
        out = objective(hidden, batch, LMHead(torch.randn(96, 32)))
        out.numerator.backward()
        assert out.numerator.item() == 0
        assert out.denominator.item() == 0
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
