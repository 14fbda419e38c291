"""`dflash prepare`: conversations to rows of token ids and loss mask, with a report and a look at the result."""

from __future__ import annotations

import argparse

from rich.console import Console

from dflash_lightning.cli import add_target_argument
from dflash_lightning.data import load_rows, prepare_rows, show_rows
from dflash_lightning.target.resolve import load_target_config, load_tokenizer


def main(argv: list[str]) -> int:
    """Run `dflash prepare`."""
    parser = argparse.ArgumentParser(prog="dflash prepare", description=__doc__)
    add_target_argument(parser)
    parser.add_argument("--data", nargs="+", required=True, help="JSONL (.gz, .zst), JSON, Parquet or Arrow; globs too")
    parser.add_argument("--out", required=True, help="folder to write; give it as data.train")
    parser.add_argument("--max-seq-len", type=int, default=8192, help="rows are cut to so many tokens (8192)")
    parser.add_argument("--min-supervised-tokens", type=int, default=2, help="rows with fewer are left out (2)")
    parser.add_argument("--show", type=int, default=3, help="rows to print decoded, supervised text in colour (3)")
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(args.target, args.trust_remote_code)
    report = prepare_rows(
        args.data,
        tokenizer,
        args.out,
        max_seq_len=args.max_seq_len,
        min_supervised_tokens=args.min_supervised_tokens,
        vocab_size=load_target_config(args.target, args.trust_remote_code).get_text_config().vocab_size,
        option="--data",
    )
    console = Console()
    show_rows(load_rows(args.out, "--out"), tokenizer, args.show, console)
    console.rule()
    console.print(str(report), highlight=False)
    return 0
