"""`dflash generate`: decode prompts with a drafter and without, and compare."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from dflash_lightning.cli import add_target_argument, existing_file
from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import (
    Decoded,
    SamplingOptions,
    decode_plain,
    decode_speculative,
    first_difference,
)
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.weights import load_drafter
from dflash_lightning.target.decode import TargetDecoder
from dflash_lightning.target.loading import FrozenHead, load_model
from dflash_lightning.target.resolve import load_tokenizer


@dataclass
class PromptResult:
    """One prompt decoded both ways."""

    prompt: str
    text: str
    tokens: int
    acceptance_length: float
    forwards: int
    seconds: float
    seconds_plain: float
    lossless: bool | None  # None when sampling: two random outputs need not be equal
    difference: str = ""


@dataclass
class Report:
    """All prompts together. Speeds in tokens per second; `acceptance_length` is the mean over all target forwards."""

    acceptance_length: float
    acceptance_by_slot: list[float]
    tokens_per_second: float
    tokens_per_second_plain: float
    lossless: bool | None
    prompts: list[PromptResult] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.tokens_per_second_plain if self.tokens_per_second_plain else 0.0


class SpeculativeDecoder:
    """A target and its embedding and LM head, ready to decode with any drafter that reads the same layers.

    Args:
        target: the target model.
        layer_ids: target layers that the drafters read.
        dtype: dtype of target and drafter; float32 makes greedy outputs comparable.
        device: where both run.
    """

    def __init__(
        self,
        target: str,
        layer_ids: Sequence[int],
        *,
        dtype: torch.dtype | str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        model = load_model(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        self.tokenizer: Any = load_tokenizer(target, trust_remote_code)
        self.layer_ids = tuple(layer_ids)
        self.target = TargetDecoder(model, layer_ids)
        self.head = FrozenHead.of(model)
        stop: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
        stop = self.tokenizer.eos_token_id if stop is None else stop
        self.stop_ids = frozenset([stop] if isinstance(stop, int) else stop or ())
        self._plain: dict[tuple[int, ...], Decoded] = {}

    def lm_head(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        """The target's logits [K, V] of final-normed states."""
        logits_KV = self.head.lm_head(hidden_KH)
        if (cap := self.head.logit_softcap) is not None:
            logits_KV = torch.tanh(logits_KV / cap) * cap
        return logits_KV

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Prompt ids, the generation prompt included."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def compare(
        self,
        drafter: DFlashDraftModel,
        conversations: Sequence[list[dict[str, Any]]],
        options: SamplingOptions,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Report:
        """Decode every prompt with the target alone and with `drafter`."""
        if tuple(target_layer_ids(drafter.config)) != self.layer_ids:
            raise ValueError(f"the drafter reads layers {target_layer_ids(drafter.config)}, not {list(self.layer_ids)}")
        drafter = drafter.to(device=self.target.device, dtype=self.head.weight.dtype).eval()
        greedy = options.temperature == 0.0
        results, gained, slots = [], [], [0] * drafter.config.block_size
        for messages in tqdm(conversations, desc="decode", disable=not progress, leave=False):
            prompt = self.encode(messages)
            plain = self._plain_once(prompt, options, seed)
            generator = None if greedy else torch.Generator(self.target.device).manual_seed(seed)
            drafted = decode_speculative(
                self.target, drafter, self.head.embedding, self.lm_head, prompt, options, generator
            )
            difference = first_difference(plain, drafted) if greedy else None
            gained += drafted.gained
            for count in drafted.gained:
                for slot in range(1, count):
                    slots[slot] += 1
            results.append(
                PromptResult(
                    prompt=str(messages[-1]["content"]),
                    text=self.tokenizer.decode(drafted.tokens, skip_special_tokens=True),
                    tokens=len(drafted.tokens),
                    acceptance_length=drafted.acceptance_length,
                    forwards=len(drafted.gained),
                    seconds=drafted.seconds,
                    seconds_plain=plain.seconds,
                    lossless=(difference is None) if greedy else None,
                    difference="" if difference is None else "token {} at a logit gap of {:.2g}".format(*difference),
                )
            )
        plain_tokens = sum(len(self._plain_once(self.encode(m), options, seed).tokens) for m in conversations)
        return Report(
            acceptance_length=sum(gained) / max(len(gained), 1),
            acceptance_by_slot=[count / max(len(gained), 1) for count in slots[1:]],
            tokens_per_second=sum(r.tokens for r in results) / max(sum(r.seconds for r in results), 1e-9),
            tokens_per_second_plain=plain_tokens / max(sum(r.seconds_plain for r in results), 1e-9),
            lossless=all(r.lossless for r in results) if greedy else None,
            prompts=results,
        )

    def _plain_once(self, prompt: list[int], options: SamplingOptions, seed: int) -> Decoded:
        # Several drafters are compared against one decoding of the target.
        key = (*prompt, options.max_new_tokens, int(options.temperature * 1e6))
        if key not in self._plain:
            generator = None if options.temperature == 0.0 else torch.Generator(self.target.device).manual_seed(seed)
            self._plain[key] = decode_plain(self.target, prompt, options, generator)
        return self._plain[key]


def read_prompts(file: Path) -> list[list[dict[str, Any]]]:
    """Conversations up to their last user turn, from JSONL (`messages` or `prompt`) or from plain lines of text."""
    conversations = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            conversations.append([{"role": "user", "content": line.strip()}])
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--prompts {file}, line {number}: not JSON: {error}") from None
        messages = record.get("messages") or record.get("conversations")
        if messages is None and isinstance(record.get("prompt"), str):
            messages = [{"role": "user", "content": record["prompt"]}]
        if not messages or not all(isinstance(m, dict) and "role" in m and "content" in m for m in messages):
            raise ValueError(f"--prompts {file}, line {number}: needs `messages` (role, content) or `prompt`")
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError(f"--prompts {file}, line {number}: no user turn")
        conversations.append(messages)
    if not conversations:
        raise ValueError(f"--prompts {file}: the file is empty")
    return conversations


def print_report(report: Report) -> None:
    """A table of the prompts and the figures below it."""
    console = Console()
    table = Table("prompt", "tokens", "tau", "speed-up", "output", title="speculative decoding", title_justify="left")
    for r in report.prompts:
        output = {None: "sampled", True: "= target", False: f"differs: {r.difference}"}[r.lossless]
        speed = f"{r.seconds_plain / r.seconds:.2f}x" if r.seconds else "-"
        table.add_row(r.prompt[:60], str(r.tokens), f"{r.acceptance_length:.2f}", speed, output)
    console.print(table)
    by_slot = " ".join(f"{share:.2f}" for share in report.acceptance_by_slot)
    console.print(f"acceptance length (tau)  {report.acceptance_length:.3f} tokens per target forward")
    console.print(f"accepted by slot         {by_slot}")
    console.print(
        f"tokens/s                 {report.tokens_per_second:.1f} with the drafter, "
        f"{report.tokens_per_second_plain:.1f} without ({report.speedup:.2f}x)"
    )
    if report.lossless is not None:
        verdict = "equals the target's own" if report.lossless else "DIFFERS from the target's own"
        console.print(f"greedy output            {verdict}")


def main(argv: list[str]) -> int:
    """Run `dflash generate`; exit code 1 when greedy output is not lossless."""
    parser = argparse.ArgumentParser(prog="dflash generate", description=__doc__)
    add_target_argument(parser)
    parser.add_argument("--drafter", required=True, help="folder with config.json and safetensors, or a checkpoint")
    parser.add_argument("--prompts", required=True, help="JSONL with `messages` or `prompt`, or plain lines")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens to decode a prompt (256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling")
    parser.add_argument("--dtype", default="float32", help="dtype of target and drafter (float32)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens={args.max_new_tokens}: at least 1")
    if args.temperature < 0:
        raise ValueError(f"--temperature={args.temperature}: not negative")
    conversations = read_prompts(existing_file("--prompts", args.prompts))
    drafter = load_drafter(args.drafter)
    decoder = SpeculativeDecoder(
        args.target,
        target_layer_ids(drafter.config),
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
    )
    options = SamplingOptions(args.max_new_tokens, args.temperature, decoder.stop_ids)
    report = decoder.compare(drafter, conversations, options, seed=args.seed, progress=not args.json)
    if args.json:
        print(json.dumps(asdict(report) | {"speedup": report.speedup}))
    else:
        print_report(report)
    return 1 if report.lossless is False else 0
