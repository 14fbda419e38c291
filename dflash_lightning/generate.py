"""`dflash generate`: decode prompts with one or more drafters and without, and compare; or chat with one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dflash_lightning.chat import Chat, run_chat
from dflash_lightning.cli import add_target_argument, check_range, existing_file
from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import SamplingOptions, resolve_num_speculative_tokens
from dflash_lightning.drafter.weights import load_drafter
from dflash_lightning.prompts import Prompt, read_prompts
from dflash_lightning.speculative import Report, SpeculativeDecoder

__all__ = ["Report", "SpeculativeDecoder", "main", "print_report", "read_prompts"]


def print_report(report: Report, title: str = "speculative decoding") -> None:
    """A table of the prompts, one of their groups, and the figures below."""
    console = Console()
    table = Table("prompt", "tokens", "tau", "speed-up", "output", title=title, title_justify="left")
    for r in report.prompts:
        output = {None: "sampled", True: "= target", False: f"differs: {r.difference}"}[r.lossless]
        speed = f"{r.seconds_plain / r.seconds:.2f}x" if r.seconds else "-"
        table.add_row(r.prompt[:60], str(r.tokens), f"{r.acceptance_length:.2f}", speed, output)
    console.print(table)
    if len(report.groups) > 1:
        table = Table("group", "prompts", "tau", "tokens/s", "without", "speed-up")
        for name, g in report.groups.items():
            speeds = (g.tokens_per_second, g.tokens_per_second_plain)
            shown = [f"{speed:.1f}" for speed in speeds]
            table.add_row(
                name, str(g.prompts), f"{g.acceptance_length:.3f}", *shown, f"{speeds[0] / max(speeds[1], 1e-9):.2f}x"
            )
        console.print(table)
    by_slot = " ".join(f"{share:.2f}" for share in report.acceptance_by_slot)
    console.print(f"acceptance length (tau)  {report.acceptance_length:.3f} tokens per target forward")
    console.print(f"accepted by slot         {by_slot}")
    console.print(
        f"tokens/s                 {report.tokens_per_second:.1f} with the drafter, "
        f"{report.tokens_per_second_plain:.1f} without ({report.speedup:.2f}x)"
    )
    console.print(f"batch size               {report.batch_size}")
    if report.lossless is not None:
        verdict = "equals the target's own" if report.lossless else "DIFFERS from the target's own"
        console.print(f"greedy output            {verdict}")


def print_comparison(reports: dict[str, Report]) -> None:
    """Tau, speed and acceptance by slot of several drafters, and tau by group."""
    console = Console()
    slots = max(len(r.acceptance_by_slot) for r in reports.values())
    headings = ["drafter", "tau", "tokens/s", "speed-up", "output", *(f"slot {k}" for k in range(1, slots + 1))]
    table = Table(*headings, title="drafters", title_justify="left")
    for name, r in reports.items():
        output = {None: "sampled", True: "= target", False: "DIFFERS"}[r.lossless]
        cells = [f"{r.acceptance_length:.3f}", f"{r.tokens_per_second:.1f}", f"{r.speedup:.2f}x", output]
        table.add_row(name, *cells, *(f"{share:.2f}" for share in r.acceptance_by_slot))
    console.print(table)
    groups = list(next(iter(reports.values())).groups)
    if len(groups) > 1:
        table = Table("tau by group", *groups)
        for name, r in reports.items():
            table.add_row(name, *(f"{r.groups[group].acceptance_length:.3f}" for group in groups))
        console.print(table)


def _as_json(report: Report) -> dict[str, Any]:
    return asdict(report) | {"speedup": report.speedup}


def main(argv: list[str]) -> int:
    """Run `dflash generate`; exit code 1 when greedy output is not lossless."""
    parser = argparse.ArgumentParser(prog="dflash generate", description=__doc__)
    add_target_argument(parser)
    parser.add_argument("--drafter", required=True, help="folder (hf or speculators layout) or checkpoint")
    parser.add_argument("--compare", nargs="+", default=[], metavar="DRAFTER", help="further drafters to compare with")
    parser.add_argument(
        "--prompts", nargs="+", default=[], help="conversations (all that data.train takes) or plain lines"
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt given here; repeatable")
    parser.add_argument("--chat", action="store_true", help="talk with the target instead; /reset, /quit or Ctrl-D")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message of the chat")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts to decode together (1)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens to decode a prompt (256)")
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=None, help="tokens to draft a forward (block size - 1)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling; prompt i takes seed + i")
    parser.add_argument("--dtype", default="float32", help="dtype of target and drafter (float32)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    args = parser.parse_args(argv)
    check_range("--max-new-tokens", args.max_new_tokens, 1)
    check_range("--temperature", args.temperature, 0)
    check_range("--batch-size", args.batch_size, 1)
    given = {"--prompts": args.prompts, "--prompt": args.prompt, "--compare": args.compare, "--json": args.json}
    if args.chat and any(given.values()):
        raise ValueError(f"--chat: goes without {', '.join(name for name, value in given.items() if value)}")
    if args.system is not None and not args.chat:
        raise ValueError("--system: only with --chat; a file of prompts can hold system messages")
    prompts = read_prompts([existing_file("--prompts", f) for f in args.prompts])
    prompts += [
        Prompt([{"role": "user", "content": text}], "prompt" if args.prompts else "all") for text in args.prompt
    ]
    if not prompts and not args.chat:
        raise ValueError("--prompts: give a file, or --prompt TEXT, or --chat")
    names = [args.drafter, *args.compare]
    if len(set(names)) < len(names):
        raise ValueError(f"--compare {' '.join(args.compare)}: a drafter is named twice")
    drafters = {name: load_drafter(name) for name in names}
    for drafter in drafters.values():
        resolve_num_speculative_tokens(drafter.config.block_size, args.num_speculative_tokens)

    decoder = SpeculativeDecoder(
        args.target,
        target_layer_ids(drafters[args.drafter].config),
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
    )
    for drafter in drafters.values():
        decoder.target_for(drafter.config)
    options = SamplingOptions(args.max_new_tokens, args.temperature, decoder.stop_ids)
    if args.chat:
        return run_chat(
            Chat(decoder, drafters[args.drafter], options, args.system, args.seed, args.num_speculative_tokens)
        )
    reports = {
        name: decoder.compare(
            drafter,
            prompts,
            options,
            seed=args.seed,
            batch_size=args.batch_size,
            progress=not args.json,
            num_speculative_tokens=args.num_speculative_tokens,
        )
        for name, drafter in drafters.items()
    }
    first = reports[args.drafter]
    if args.json:
        shown = _as_json(first)
        if args.compare:
            shown["drafters"] = {name: _as_json(report) for name, report in reports.items()}
        print(json.dumps(shown))
    else:
        for name, report in reports.items():
            print_report(report, "speculative decoding" if len(reports) == 1 else name)
        if args.compare:
            print_comparison(reports)
    return 1 if any(report.lossless is False for report in reports.values()) else 0
