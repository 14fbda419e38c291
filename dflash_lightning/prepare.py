"""`dflash prepare`: conversations to rows of token ids and loss mask, with a report and a look at the result."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_lightning import fill_cache
from dflash_lightning.cli import add_target_argument
from dflash_lightning.data import PrepareReport, load_rows, prepare_rows, read_report, show_rows
from dflash_lightning.row_figures import PICTURE, figures_text, row_figures, write_picture
from dflash_lightning.target.resolve import load_target_config, load_tokenizer


def main(argv: list[str]) -> int:
    """Run `dflash prepare`; exit code 130 when Ctrl-C stopped it."""
    parser = argparse.ArgumentParser(prog="dflash prepare", description=__doc__)
    add_target_argument(parser)
    parser.add_argument("--data", nargs="+", required=True, help="JSONL (.gz, .zst), JSON, Parquet or Arrow; globs too")
    parser.add_argument(
        "--weights", nargs="+", type=float, help="one a --data entry: 2 takes its records twice, 0.5 half"
    )
    parser.add_argument("--out", required=True, help="folder to write; give it as data.train")
    parser.add_argument("--max-seq-len", type=int, default=8192, help="rows are cut to so many tokens (8192)")
    parser.add_argument("--min-supervised-tokens", type=int, default=2, help="rows with fewer are left out (2)")
    parser.add_argument("--workers", type=int, help="processes (the usable cores); 1 works in this process")
    parser.add_argument("--show", type=int, default=3, help="rows to print decoded, supervised text in colour (3)")
    fill_cache.add_arguments(parser)
    args = parser.parse_args(argv)
    # Before the rows are made, not after.
    fill_cache.check_plan(args)
    if args.hidden_states:
        fill_cache.check(args)
    tokenizer = load_tokenizer(args.target, args.trust_remote_code)

    def finish(folder: Path, report: PrepareReport, lengths: Any, supervised: Any) -> dict[str, Any]:
        figures = row_figures(lengths, supervised, token_budget=args.token_budget, num_buckets=args.num_buckets)
        write_picture(folder / PICTURE, report.as_dict() | figures)
        return figures

    try:
        report = prepare_rows(
            args.data,
            tokenizer,
            args.out,
            max_seq_len=args.max_seq_len,
            min_supervised_tokens=args.min_supervised_tokens,
            vocab_size=load_target_config(args.target, args.trust_remote_code).get_text_config().vocab_size,
            weights=args.weights,
            workers=args.workers,
            option="--data",
            finish=finish,
        )
    except KeyboardInterrupt:
        print("\ndflash prepare: stopped; the same command goes on where this one was", file=sys.stderr)
        return 130
    console = Console()
    show_rows(load_rows(args.out, "--out"), tokenizer, args.show, console)
    console.rule()
    console.print(str(report), highlight=False)
    console.print(figures_text(read_report(args.out)), highlight=False, soft_wrap=True)
    console.print(f"the picture: {Path(args.out) / PICTURE}", highlight=False, soft_wrap=True)
    if args.hidden_states:
        fill_cache.run(args, args.out)
    return 0
