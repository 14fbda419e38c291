"""`dflash export`: write a trained drafter as a folder that vLLM, SGLang and the released inference code load."""

from __future__ import annotations

import argparse
import sys

from dflash_lightning.drafter.export import DTYPES, export_drafter
from dflash_lightning.drafter.layouts import FORMATS


def main(argv: list[str]) -> int:
    """Run `dflash export`."""
    parser = argparse.ArgumentParser(prog="dflash export", description=__doc__)
    parser.add_argument("--ckpt", required=True, help="checkpoint of a run (it may still be going on), or an export")
    parser.add_argument("--out", required=True, help="folder to write; an earlier export in it is replaced")
    parser.add_argument("--format", default="hf", choices=FORMATS, help="layout of the folder (hf)")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="dtype of the weights (bfloat16)")
    parser.add_argument("--target", default=None, help="name of the target to record instead of the checkpoint's")
    parser.add_argument("--trained-max-length", type=int, default=None, help="longest text of the training, in tokens")
    args = parser.parse_args(argv)
    if args.trained_max_length is not None and args.trained_max_length < 1:
        raise ValueError(f"--trained-max-length {args.trained_max_length}: at least 1")
    done = export_drafter(
        args.ckpt,
        args.out,
        args.format,
        dtype=args.dtype,
        target=args.target,
        trained_max_length=args.trained_max_length,
    )
    print(f"{done.folder}: {args.format} layout, {done.num_parameters:,} parameters in {args.dtype}")
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
