"""The drafter's training step on one CUDA device at the reference run's size: time, memory, share of matmul peak.

Hidden 5120, intermediate 17408, 5 layers, 32/8 heads of 128, 1,024 blocks of 32 slots, 16 K packed tokens, bf16
autocast over float32 weights, flex attention, fused AdamW, clipping. Weights and states are random: the time does not
depend on them.

    python benchmarks/gpu_step.py [--steps 10] [--compile]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable

import torch
from transformers import Qwen3Config

from dflash_lightning.batch import HiddenStateBatch
from dflash_lightning.drafter.config import build_draft_config
from dflash_lightning.drafter.layout import draw_layout, make_block_layout
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.objective import LMHead, Objective

HIDDEN, TAPPED, BLOCK, ANCHORS, CONTEXT, DOCUMENTS = 5120, 5, 32, 1024, 16384, 8
VOCAB = 248_320


def make_batch(seed: int, device: torch.device) -> HiddenStateBatch:
    """Random packed rows, laid out on the host as the loader does it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (CONTEXT,), generator=generator)
    mask = torch.rand(CONTEXT, generator=generator) < 0.98
    documents = torch.arange(CONTEXT) * DOCUMENTS // CONTEXT
    positions = torch.arange(CONTEXT) % (CONTEXT // DOCUMENTS)
    layout = draw_layout(ids, mask, documents, positions, block_size=BLOCK, max_anchors=ANCHORS, seed=seed)
    hidden = torch.randn(CONTEXT, TAPPED * HIDDEN, device=device, dtype=torch.bfloat16)
    batch = HiddenStateBatch(
        input_ids=ids, hidden_states=hidden, loss_mask=mask, document_ids=documents, positions=positions, **layout
    )
    return batch.to(device)


def matmul_peak() -> float:
    """FLOP/s of a large bf16 matmul, the ceiling that a step is held against."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    seconds = timed(lambda: torch.mm(a, a), 20)
    return 2 * 8192**3 / seconds


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run` on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    target = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    config = build_draft_config(target, num_layers=5, block_size=BLOCK, mask_token_id=VOCAB - 1)
    with device:
        drafter = DFlashDraftModel(config)
        embedding = torch.nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16).requires_grad_(False)
        head = LMHead(torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16) * 0.02)
    if args.compile:
        for layer in drafter.layers:
            layer.compile()
    parameters = list(drafter.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=6e-4, fused=True)
    objective = Objective(gamma=10.0)
    batches = [make_batch(seed, device) for seed in range(3)]
    turn = iter(range(10**9))

    def step() -> None:
        batch = batches[next(turn) % len(batches)]
        layout = make_block_layout(batch)
        block_ids = torch.full_like(batch.labels, VOCAB - 1)
        block_ids[:, 0] = batch.input_ids[layout.anchors]
        with torch.autocast("cuda", torch.bfloat16):
            states = drafter(embedding(block_ids).bfloat16(), batch.hidden_states, layout, attention="flex")
            out = objective(states, batch, head)
        out.numerator.backward()
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / out.denominator)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    peak = matmul_peak()
    for _ in range(3):  # compiles flex attention and makes the optimizer's state
        step()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, args.steps)
    memory = torch.cuda.max_memory_allocated() - resident
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    syncs = [str(w.message) for w in caught if "synchroniz" in str(w.message).lower()]

    slots = int(batches[0].label_mask.sum())
    layers = sum(p.numel() for n, p in drafter.named_parameters() if p.ndim == 2 and n != "fc.weight")
    kv = sum(p.numel() for n, p in drafter.named_parameters() if "k_proj" in n or "v_proj" in n)
    # Forward and two backward products of every matrix; the head has no weight gradient. Attention is left out.
    flops = 6 * (layers * ANCHORS * BLOCK + (kv + drafter.fc.weight.numel()) * CONTEXT) + 4 * slots * VOCAB * HIDDEN
    print(f"{torch.cuda.get_device_name()}: {seconds * 1e3:.1f} ms a step, {CONTEXT / seconds:,.0f} packed tokens/s")
    print(f"step memory above weights and optimizer {memory / 2**30:.2f} GiB, host syncs {len(syncs)}")
    print(f"matmul peak {peak / 1e12:.0f} TFLOP/s, the step's matmuls at {flops / seconds / peak:.1%} of it")
    result = {
        "ms": round(seconds * 1e3, 2),
        "tokens_per_s": round(CONTEXT / seconds),
        "memory_gib": round(memory / 2**30, 3),
        "peak_share": round(flops / seconds / peak, 4),
        "host_syncs": len(syncs),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
