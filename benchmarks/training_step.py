"""One training step, forward and backward, of ours against the PyPI package `speculators`: time and memory, as ratios.

Same drafter, same inputs, same anchors, cross-entropy with decay; each case in a fresh process, best of a few steps.
CPU: float32, one thread, CPU seconds, and peak resident memory minus what was resident before the first step.
CUDA: bfloat16 autocast, flex attention, milliseconds, peak allocated memory and the share of the measured matmul peak.

    python benchmarks/training_step.py [--peer-python PATH] [--device cpu|cuda] [--anchors 64 256]

Without --peer-python the peer is installed into a virtual environment of its own (--peer-dir), which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536, "vocab": 49152,
    "layers": 5, "tapped": 5, "context": 1024, "block_size": 16, "gamma": 7.0, "mask_token_id": 16,
}  # fmt: skip
# The peer's own pins, without the parts that would pull CUDA builds onto a machine that has no device.
PEER_INSTALL = (
    ("torch=={torch}",),
    ("transformers>=5.16,<=5.19.0", "datasets<=5.1.0", "loguru<=0.7.3", "pydantic", "pydantic-settings", "typer",
     "psutil", "openai", "aiohttp", "protobuf"),
    ("--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"),
)  # fmt: skip


def draw_inputs(num_anchors: int) -> dict[str, torch.Tensor]:
    """Inputs that both sides read: one document, all supervised but its end, so that every block fits."""
    generator = torch.Generator().manual_seed(0)
    context, vocab, hidden = SHAPE["context"], SHAPE["vocab"], SHAPE["hidden"]
    loss_mask = torch.ones(context, dtype=torch.bool)
    loss_mask[-SHAPE["block_size"] :] = False
    return {
        "input_ids": torch.randint(0, vocab, (context,), generator=generator),
        "hidden_states": torch.randn(context, SHAPE["tapped"] * hidden, generator=generator),
        "last_hidden_state": torch.randn(context, hidden, generator=generator),
        "loss_mask": loss_mask,
        "document_ids": torch.zeros(context, dtype=torch.int64),
        "positions": torch.arange(context),
        "embedding": torch.randn(vocab, hidden, generator=generator) * 0.1,
        "lm_head": torch.randn(vocab, hidden, generator=generator) * 0.05,
        "num_anchors": torch.tensor(num_anchors),
    }


def ours(inputs: dict[str, torch.Tensor], device: torch.device, attention: str):
    """A function that runs one step and returns the loss; and the trainable parameters."""
    sys.path.insert(0, str(ROOT))
    from transformers import Qwen3Config

    from dflash_lightning.batch import HiddenStateBatch
    from dflash_lightning.drafter.config import build_draft_config
    from dflash_lightning.drafter.layout import draw_layout, make_block_layout
    from dflash_lightning.drafter.model import DFlashDraftModel
    from dflash_lightning.drafter.objective import LMHead, Objective

    target = Qwen3Config(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["intermediate"],
        num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"], head_dim=SHAPE["head_dim"],
        num_hidden_layers=30,
    )  # fmt: skip
    config = build_draft_config(
        target, num_layers=SHAPE["layers"], block_size=SHAPE["block_size"], mask_token_id=SHAPE["mask_token_id"]
    )
    model = DFlashDraftModel(config).to(device)
    objective = Objective(gamma=SHAPE["gamma"])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    embedding = inputs.pop("embedding").to(device, dtype)
    head = LMHead(inputs.pop("lm_head").to(device, dtype))
    names = ("input_ids", "hidden_states", "loss_mask", "document_ids", "positions")
    tensors = {name: inputs[name] for name in names}
    tensors["hidden_states"] = tensors["hidden_states"].to(dtype)

    def step() -> torch.Tensor:
        layout = draw_layout(
            tensors["input_ids"], tensors["loss_mask"], tensors["document_ids"], tensors["positions"],
            block_size=SHAPE["block_size"], max_anchors=int(inputs["num_anchors"]), seed=0,
        )  # fmt: skip
        batch = HiddenStateBatch(**tensors, **layout).to(device)
        tokens = torch.full_like(batch.labels, SHAPE["mask_token_id"])
        tokens[:, 0] = batch.input_ids[batch.anchors]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model(embedding[tokens], batch.hidden_states, make_block_layout(batch), attention=attention)
            out = objective(hidden, batch, head)
        loss = out.numerator / out.denominator
        loss.backward()
        return loss.detach()

    return step, list(model.parameters())


def peer(inputs: dict[str, torch.Tensor], device: torch.device, attention: str):
    """The same for `speculators`; `attention` is one of its own names."""
    import speculators.models.dflash.core as core
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer_config = Qwen3Config(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["intermediate"],
        num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"], head_dim=SHAPE["head_dim"],
        num_hidden_layers=SHAPE["layers"],
    )  # fmt: skip
    layer_config._attn_implementation = attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=SHAPE["vocab"],
        block_size=SHAPE["block_size"],
        aux_hidden_state_layer_ids=[1, 8, 14, 20, 27],
        mask_token_id=SHAPE["mask_token_id"],
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=SHAPE["block_size"] - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = core.DFlashDraftModel(config)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(inputs.pop("embedding"))
        head = inputs.pop("lm_head")
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        del head
        model.verifier_norm.weight.fill_(1.0)
    model.to(device)
    implementation = "fused" if device.type == "cuda" else "eager"
    batch = {
        "input_ids": inputs["input_ids"],
        "hidden_states": inputs["hidden_states"],
        "verifier_last_hidden_states": inputs["last_hidden_state"],
        "loss_mask": inputs["loss_mask"].float(),
        "document_ids": inputs["document_ids"],
    }
    options = {
        "loss_config": resolve_loss_config("ce", implementation),
        "gamma": SHAPE["gamma"],
        "max_anchors": int(inputs["num_anchors"]),
    }

    def step() -> torch.Tensor:
        tensors = {name: value[None].to(device) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            _, loss, _ = model(**tensors, **options)
        loss.backward()
        return loss.detach()

    return step, [p for p in model.parameters() if p.requires_grad]


def run_case(case: str, path: str, device: torch.device, attention: str, steps: int) -> dict[str, float]:
    """Measure one case in this process."""
    torch.set_num_threads(1)
    step, parameters = {"ours": ours, "peer": peer}[case](torch.load(path, weights_only=True), device, attention)
    if device.type == "cuda":
        return _measure_cuda(step, parameters, steps)
    memory, seconds = 0.0, []
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = None
        if number == 0:
            before = _status_kib("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
        start = time.process_time()
        loss = step()
        seconds.append(time.process_time() - start)
        if number == 0:
            memory = (_status_kib("VmHWM") - before) / 1024
    return {"seconds": min(seconds), "memory_mib": memory, "loss": float(loss)}


def _measure_cuda(step, parameters, steps: int) -> dict[str, float]:
    for _ in range(3):  # compilation and warm-up
        step()
    torch.cuda.synchronize()
    for parameter in parameters:
        parameter.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    milliseconds = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return {"seconds": min(milliseconds) / 1000, "memory_mib": memory, "loss": float(loss)}


def _status_kib(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def step_flops(num_anchors: int) -> float:
    """Matmul operations that one of our steps needs: projections three times (forward, two gradients), head twice."""
    hidden, head_dim, size = SHAPE["hidden"], SHAPE["head_dim"], SHAPE["block_size"]
    slots, context = num_anchors * size, SHAPE["context"]
    kv = 2 * hidden * SHAPE["kv_heads"] * head_dim
    layer = 2 * hidden * SHAPE["heads"] * head_dim + kv + 3 * hidden * SHAPE["intermediate"]
    projections = SHAPE["layers"] * (slots * layer + context * kv) + context * SHAPE["tapped"] * hidden * hidden
    scores = SHAPE["layers"] * slots * (context / 2 + size) * SHAPE["heads"] * head_dim
    head = num_anchors * (size - 1) * hidden * SHAPE["vocab"]
    # Attention: two products forward; five backward, one of them the recomputed scores.
    return 2 * (3 * projections + 7 * scores + 2 * head)


def matmul_peak(device: torch.device) -> float:
    """Operations a second of a large matmul, in the dtype of the step."""
    size, dtype = (1024, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    torch.set_num_threads(1)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    best = float("inf")
    for _ in range(20):
        start = clock()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return 2 * size**3 / best


def install_peer(directory: Path) -> Path:
    """Python of a virtual environment that holds the peer; made on the first call."""
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        for requirements in PEER_INSTALL:
            names = [name.format(torch=torch.__version__.split("+")[0]) for name in requirements]
            subprocess.run([str(python), "-m", "pip", "install", "-q", *names], check=True)
        (directory / "complete").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 256], help="anchors a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a case; the fastest counts")
    parser.add_argument("--peer-python", type=Path, help="Python that can import speculators")
    parser.add_argument("--peer-dir", type=Path, default=Path(tempfile.gettempdir()) / "dflash-peer-speculators")
    parser.add_argument("--ours-only", action="store_true", help="no peer, no ratios")
    parser.add_argument("--case", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--inputs", help=argparse.SUPPRESS)
    parser.add_argument("--attention", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.case:
        print("CASE " + json.dumps(run_case(args.case, args.inputs, device, args.attention, args.steps)))
        return

    cases = [("ours", Path(sys.executable), "auto")]
    if not args.ours_only:
        # On CPU the peer has two ways that can train; take the better of them, figure by figure.
        ways = ["sdpa", "eager"] if device.type == "cpu" else ["simple_flex_attention"]
        cases += [("peer", args.peer_python or install_peer(args.peer_dir), way) for way in ways]
    result: dict[str, Any] = {"device": args.device, "peer": "speculators 0.9.0"}
    peak = matmul_peak(device)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "inputs.pt"
        for anchors in args.anchors:
            torch.save(draw_inputs(anchors), path)
            for case, python, attention in cases:
                command = [str(python), str(Path(__file__).resolve()), "--case", case, "--inputs", str(path)]
                command += ["--device", args.device, "--steps", str(args.steps), "--attention", attention]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                line = next(line for line in output.splitlines() if line.startswith("CASE "))
                values = json.loads(line.removeprefix("CASE "))
                print(
                    f"{anchors:4} anchors  {case} ({attention})  {values['seconds']:.3f} s  "
                    f"{values['memory_mib']:.0f} MiB",
                    flush=True,
                )
                for name in ("seconds", "memory_mib"):
                    key = f"{case}_{name}_{anchors}"
                    result[key] = min(round(values[name], 4), result.get(key, float("inf")))
            share = step_flops(anchors) / (result[f"ours_seconds_{anchors}"] * peak)
            result[f"ours_share_of_matmul_peak_{anchors}"] = round(share, 3)
            if not args.ours_only:
                for name, unit in (("cpu" if device.type == "cpu" else "time", "seconds"), ("memory", "memory_mib")):
                    ratio = result[f"ours_{unit}_{anchors}"] / result[f"peer_{unit}_{anchors}"]
                    result[f"{name}_ratio_{anchors}"] = round(ratio, 3)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
