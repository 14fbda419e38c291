"""CUDA twins of the CPU paths; run where there is a device (benchmarks/gpu.sh)."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from dflash_lightning.batch import HiddenStateBatch
from dflash_lightning.drafter.config import build_draft_config
from dflash_lightning.drafter.layout import draw_layout, make_block_layout
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.objective import LMHead, Objective

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCAB = 512


def make(layer_types=None, tokens: int = 700, seed: int = 0):
    torch.manual_seed(seed)
    target = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    config = build_draft_config(
        target, num_layers=2, block_size=8, mask_token_id=VOCAB - 1, layer_types=layer_types, sliding_window=64
    )
    drafter = DFlashDraftModel(config)
    ids = torch.randint(0, VOCAB, (tokens,))
    mask = torch.rand(tokens) < 0.9
    documents = (torch.arange(tokens) * 3) // tokens
    positions = torch.cat([torch.arange(int((documents == d).sum())) for d in range(3)])
    layout = draw_layout(ids, mask, documents, positions, block_size=8, max_anchors=64, seed=seed)
    batch = HiddenStateBatch(
        input_ids=ids, hidden_states=torch.randn(tokens, 256), loss_mask=mask, document_ids=documents,
        positions=positions, **layout,
    )  # fmt: skip
    embedding = torch.randn(VOCAB, 128) * 0.1
    head = LMHead(torch.randn(VOCAB, 128) * 0.1)
    return drafter, batch, embedding, head


def loss(drafter: DFlashDraftModel, batch: HiddenStateBatch, embedding, head, attention: str):
    layout = make_block_layout(batch)
    block_ids = torch.full_like(batch.labels, VOCAB - 1)
    block_ids[:, 0] = batch.input_ids[layout.anchors]
    states = drafter(embedding[block_ids], batch.hidden_states, layout, attention=attention)
    return states, Objective()(states, batch, head)


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention", "full_attention"]])
@pytest.mark.parametrize("attention", ["flex", "sdpa", "blockwise"])
def test_backends_on_cuda_equal_the_cpu(attention: str, layer_types) -> None:
    drafter, batch, embedding, head = make(layer_types)
    states, out = loss(drafter, batch, embedding, head, "blockwise")
    out.numerator.backward()
    expected = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    drafter.cuda()
    cuda_head = LMHead(head.weight.cuda())
    cuda_states, cuda_out = loss(drafter, batch.to("cuda"), embedding.cuda(), cuda_head, attention)
    cuda_out.numerator.backward()
    torch.testing.assert_close(cuda_states.cpu(), states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cuda_out.numerator.cpu(), out.numerator, atol=1e-2, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad.cpu(), expected[name], atol=1e-4 * largest, rtol=1e-3, msg=name)


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention", "sliding_attention"]])
def test_no_host_sync_in_forward_and_backward(layer_types) -> None:
    drafter, batch, embedding, head = make(layer_types)
    drafter.cuda()
    batch, embedding, head = batch.to("cuda"), embedding.cuda(), LMHead(head.weight.cuda())
    for _ in range(2):
        loss(drafter, batch, embedding, head, "flex")[1].numerator.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(drafter, batch, embedding, head, "flex")[1].numerator.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bf16_autocast_is_close_to_float32() -> None:
    drafter, batch, embedding, head = make()
    drafter.cuda()
    batch, embedding, head = batch.to("cuda"), embedding.cuda(), LMHead(head.weight.cuda())
    exact = loss(drafter, batch, embedding, head, "flex")[1]
    with torch.autocast("cuda", torch.bfloat16):
        low = loss(drafter, batch, embedding.bfloat16(), LMHead(head.weight.bfloat16()), "flex")[1]
    assert abs(float(low.numerator / exact.numerator) - 1) < 0.02


def test_lengths_share_compiled_kernels() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for seed, tokens in enumerate((500, 611, 702, 803, 904)):
        drafter, batch, embedding, head = make(tokens=tokens, seed=seed)
        drafter.cuda()
        loss(drafter, batch.to("cuda"), embedding.cuda(), LMHead(head.weight.cuda()), "flex")[1].numerator.backward()
    assert counters["stats"]["unique_graphs"] <= 10
