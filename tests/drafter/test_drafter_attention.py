"""Who sees what, and that the backends agree."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dflash_lightning.drafter.attention import (
    FLEX_BLOCK,
    block_attention,
    context_padding,
    dense_mask,
    flex_block_mask,
    resolve_backend,
)
from dflash_lightning.drafter.layout import draw_layout, make_block_layout

SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 6}


def run(model, batch, embeddings, attention="blockwise"):
    with torch.no_grad():
        return model(embeddings, batch.hidden_states, make_block_layout(batch), attention=attention)


def test_a01_a_block_sees_no_state_at_or_after_its_anchor(make_batch, make_drafter, embed_blocks):
    batch, model = make_batch([32], block_size=8, anchors=[4, 6, 9]), make_drafter(block_size=8)
    embeddings = embed_blocks(batch)
    before = run(model, batch, embeddings)
    batch.hidden_states[6:] += 1.0
    after = run(model, batch, embeddings)
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])
    # And the last state that it may see does count.
    batch.hidden_states[5] += 1.0
    assert not torch.equal(run(model, batch, embeddings)[1], after[1])


def test_a04_a_full_block_is_bidirectional_and_alone(make_batch, make_drafter, embed_blocks):
    batch, model = make_batch([40], block_size=8, anchors=[5, 8, 12]), make_drafter(block_size=8)
    embeddings = embed_blocks(batch)
    before = run(model, batch, embeddings)
    embeddings[1, 7] += 1.0
    after = run(model, batch, embeddings)
    assert not torch.equal(after[1, 1], before[1, 1])
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_a_sliding_block_is_causal_unless_the_config_says_otherwise(make_batch, make_drafter, embed_blocks):
    batch = make_batch([40], anchors=[5, 12])
    embeddings = embed_blocks(batch)
    perturbed = embeddings.clone()
    perturbed[0, 3] += 1.0
    for sliding_causal in (True, False):
        model = make_drafter(**SLIDING, sliding_causal=sliding_causal)
        before, after = run(model, batch, embeddings), run(model, batch, perturbed)
        assert torch.equal(after[0, :3], before[0, :3]) is sliding_causal
        assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("layers", [{}, SLIDING])
def test_other_documents_blocks_and_padding_leave_a_block_bit_identical(layers, make_batch, make_drafter, embed_blocks):
    batch = make_batch([23, 1, 40, 17], anchors=[3, 9, 24, 31, 33, 50, 70], num_blocks=12)
    model, block = make_drafter(**layers), 4  # anchor 33, position 9 of the document at 24..63
    embeddings = embed_blocks(batch)
    before = run(model, batch, embeddings)[block]
    hidden = batch.hidden_states.clone()
    changed = torch.ones(len(hidden), dtype=torch.bool)
    changed[24:33] = False
    batch.hidden_states[changed] = torch.randn(int(changed.sum()), hidden.shape[1]) * 5
    others = torch.arange(12) != block
    embeddings[others] = torch.randn(11, *embeddings.shape[1:])
    after = run(model, batch, embeddings)
    assert torch.isfinite(after).all()
    assert torch.equal(after[block], before)


def random_case(seed):
    """Random documents, anchors (some at a document's start), padding and grouped heads."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (6,), generator=generator).tolist()
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    total = len(documents)
    fields = draw_layout(
        torch.zeros(total, dtype=torch.int64), torch.ones(total, dtype=torch.bool), documents, positions,
        block_size=4, max_anchors=64 if seed % 2 else 30, seed=seed,
    )  # fmt: skip
    batch = type("Batch", (), {**fields, "positions": positions})()
    n, heads, kv_heads, size = len(fields["anchors"]), 6, 2, 8
    shapes = [(n, 4, heads, size), (total, kv_heads, size), (total, kv_heads, size), *[(n, 4, kv_heads, size)] * 2]
    return make_block_layout(batch), [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(("window", "causal"), [(None, False), (None, True), (7, True), (5, False)])
def test_backends_agree_forward_and_backward(window, causal):
    for seed in range(4):
        layout, tensors = random_case(seed)
        weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(seed))
        results = {}
        for backend in ("sdpa", "blockwise"):
            inputs = [x.clone().requires_grad_() for x in tensors]
            out = block_attention(*inputs, layout, window=window, causal_block=causal, backend=backend)
            results[backend] = (out, *torch.autograd.grad((out * weight).sum(), inputs))
        for one, other in zip(*results.values(), strict=True):
            assert torch.isfinite(one).all()
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        q, k_ctx, v_ctx, *own = tensors
        padding = (0, 0, 0, 0, 0, context_padding(len(k_ctx), "flex"))
        k_ctx, v_ctx = (torch.nn.functional.pad(x, padding) for x in (k_ctx, v_ctx))
        out = block_attention(q, k_ctx, v_ctx, *own, layout, window=window, causal_block=causal, backend="flex")
        torch.testing.assert_close(out, results["sdpa"][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (90, True)])
@pytest.mark.parametrize("supervised", [None, range(900, 922)])  # the second pads within a tile row
def test_flex_tiles_cover_the_dense_mask(window, causal, supervised, make_batch):
    batch = make_batch([700, 90, 1, 500], supervised=supervised, block_size=16, max_anchors=100)
    layout = make_block_layout(batch)
    dense = dense_mask(layout, window, causal)
    context, padding = dense[:, : layout.num_context], context_padding(layout.num_context, "flex")
    dense = torch.cat([context, context.new_zeros(len(context), padding), dense[:, layout.num_context :]], dim=1)
    rows, columns = (-(-size // FLEX_BLOCK) for size in dense.shape)
    dense = torch.nn.functional.pad(dense, (0, columns * FLEX_BLOCK - dense.shape[1]))

    mask = flex_block_mask(layout, window, causal)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    assert mask.kv_indices.shape[-2:] == (rows, columns)
    full_tiles = 0
    for row, part in enumerate(dense.split(FLEX_BLOCK)):
        tiles = part.unflatten(1, (columns, FLEX_BLOCK))
        needed = set(tiles.any(2).any(0).nonzero()[:, 0].tolist())
        partial = set(mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist())
        full = set(mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist())
        assert needed <= partial | full
        assert not partial & full
        context_tiles = [tile for tile in needed if tile < (layout.num_context + padding) // FLEX_BLOCK]
        listed = [tile for tile in partial | full if tile < (layout.num_context + padding) // FLEX_BLOCK]
        # Blocks without context, padding among them, must not stretch the range of their row.
        assert len(listed) <= (max(context_tiles) - min(context_tiles) + 1 if context_tiles else 0)
        for tile in full:
            assert tiles[:, tile].all()
        full_tiles += len(full)
    # Long contexts must mostly be full tiles, which need no mask at all.
    assert window is not None or supervised is not None or full_tiles > 10


def test_a14_flex_compiles_few_times_and_equals_sdpa(make_batch, make_drafter, embed_blocks):
    torch._dynamo.reset()
    model, counter = make_drafter(num_layers=1, target_layer_ids=[1, 4]), CompileCounter()
    for number, length in enumerate([100, 210, 301, 390, 520]):
        batch = make_batch([length // 3, length - length // 3], max_anchors=64, seed=number)
        embeddings = embed_blocks(batch)
        expected = run(model, batch, embeddings, "sdpa")
        model.layers[0].compile(backend=counter)
        compiled = run(model, batch, embeddings, "flex")
        model.layers[0]._compiled_call_impl = None
        torch.testing.assert_close(compiled, expected, atol=1e-4, rtol=0)
    assert counter.frame_count <= 3


def test_a14_flex_sees_whole_tiles_and_few_lengths():
    lengths = {n + context_padding(n, "flex") for n in range(4096, 65536)}
    assert all(length % FLEX_BLOCK == 0 for length in lengths)
    assert len(lengths) <= 4 * 8 + 1
    assert all(context_padding(n, "flex") <= max(n // 8, FLEX_BLOCK) for n in range(1, 20000, 7))
    assert context_padding(1000, "blockwise") == context_padding(1000, "sdpa") == 0


def test_a14_block_mask_needs_no_dense_grid(make_batch):
    batch = make_batch([9000, 7000], block_size=16, max_anchors=1024)
    layout = make_block_layout(batch)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    with Largest() as largest:
        flex_block_mask(layout, None, False)

    slots = 1024 * 16
    assert largest.numel <= 4 * slots  # the dense grid has slots * 32,384 entries


def test_flex_refuses_to_train_on_cpu(make_batch, make_drafter, embed_blocks):
    batch = make_batch([30])
    with pytest.raises(ValueError, match="attention='flex'"):
        make_drafter()(embed_blocks(batch), batch.hidden_states, make_block_layout(batch), attention="flex")


def test_auto_backend():
    assert resolve_backend("auto", torch.device("cuda")) == "flex"
    assert resolve_backend("auto", torch.device("cpu")) == "blockwise"
    with pytest.raises(ValueError, match="attention='dense'"):
        resolve_backend("dense", torch.device("cpu"))
