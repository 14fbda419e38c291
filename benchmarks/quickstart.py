"""The quickstart: train a small drafter on the real target, then decode held-out prompts before and after.

Run by `make quickstart`. Last line: `RESULT {json}` with the acceptance length of real decoding before and after
training, whether greedy output equals the target's own, and the seconds that training took.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from lightning.pytorch import seed_everything

from dflash_lightning.callbacks import find_last_checkpoint
from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import SamplingOptions
from dflash_lightning.drafter.weights import load_drafter
from dflash_lightning.generate import SpeculativeDecoder, print_report, read_prompts

CONFIG = Path("configs/quickstart.yaml")
PROMPTS = Path("configs/quickstart/heldout_prompts.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default=None, help="run folder (that of the config); an old run in it is replaced")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="further options of `dflash fit`, after --")
    args = parser.parse_args()
    config = yaml.safe_load(CONFIG.read_text())
    run_dir = Path(args.run_dir or config["trainer"]["default_root_dir"])
    overrides = [o for o in args.overrides if o != "--"]

    if run_dir.exists():
        print(f"removing the old run in {run_dir}")
        shutil.rmtree(run_dir)
    fit = ["fit", "--config", str(CONFIG), "--trainer.default_root_dir", str(run_dir), *overrides]
    print("$ dflash", *fit, flush=True)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dflash_lightning", *fit], check=True)
    train_seconds = time.perf_counter() - started

    checkpoint = find_last_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    trained = load_drafter(checkpoint)
    target = config["data"]["target"]
    # One sequence has too little work for more threads, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    decoder = SpeculativeDecoder(target, target_layer_ids(trained.config))
    options = SamplingOptions(args.max_new_tokens, stop_ids=decoder.stop_ids)
    conversations = read_prompts(PROMPTS)
    print(f"\ndecoding {len(conversations)} held-out prompts", flush=True)
    # The drafter as training found it: same configuration and seed.
    seed_everything(0, verbose=False)
    untrained = type(trained)(trained.config)
    before = decoder.compare(untrained, conversations, options, batch_size=10)
    after = decoder.compare(trained, conversations, options, batch_size=10)
    print_report(after)

    print(f"""
acceptance length  {before.acceptance_length:.3f} before training, {after.acceptance_length:.3f} after

What to look at now:
  tensorboard --logdir {run_dir}                      loss, acceptance length, where the seconds went
  dflash generate --target {target} --drafter {checkpoint} --prompts {PROMPTS}
  dflash fit --config {CONFIG} --trainer.max_steps 600 --ckpt_path last      train on
  (the commands live in {Path(sys.executable).parent})""")
    result = {
        "acceptance_before": round(before.acceptance_length, 4),
        "acceptance_after": round(after.acceptance_length, 4),
        "lossless": bool(before.lossless and after.lossless),
        "train_seconds": round(train_seconds, 1),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
