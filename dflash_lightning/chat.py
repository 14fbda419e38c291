"""`dflash generate --chat`: talk with the target in the terminal, decoded with a drafter as the words appear."""

from __future__ import annotations

import sys
from typing import Any

from dflash_lightning.drafter.decoding import Decoded, SamplingOptions
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.speculative import SpeculativeDecoder

_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class Chat:
    """A conversation with its history, rendered by the target's own template at every turn.

    Args:
        decoder: the target.
        drafter: drafts for it.
        options: how tokens are chosen.
        system: system message, if any.
        seed: seed of the first answer when sampling; each further one takes the next number.
        num_speculative_tokens: tokens to draft a forward; None drafts block_size - 1.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        drafter: DFlashDraftModel,
        options: SamplingOptions,
        system: str | None = None,
        seed: int = 0,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.drafter = drafter.to(device=decoder.target.device, dtype=decoder.head.weight.dtype).eval()
        self.options = options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._seed = seed
        self._num_speculative_tokens = num_speculative_tokens
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages: list[dict[str, Any]] = list(self._system)

    def answer(self, text: str, write: Any) -> Decoded | None:
        """Answer `text`, giving each piece to `write` as it is verified; None where Ctrl-C cut it short."""
        # Nothing is kept of a turn that the template refuses.
        ids = self.decoder.encode([*self.messages, {"role": "user", "content": text}])
        stream = _Stream(self.decoder, write)
        out = None
        try:
            out = self.decoder.decode(
                self.drafter,
                ids,
                self.options,
                seed=self._seed,
                num_speculative_tokens=self._num_speculative_tokens,
                on_tokens=stream.add,
            )
        except KeyboardInterrupt:
            pass
        stream.finish()
        self._seed += 1
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": stream.shown}]
        return out


class _Stream:
    """Text of the tokens so far, written as far as it is certain: a character may need several tokens."""

    def __init__(self, decoder: SpeculativeDecoder, write: Any) -> None:
        self._decoder, self._write = decoder, write
        self._tokens: list[int] = []
        self.shown = ""

    def add(self, tokens: list[int]) -> None:
        self._tokens += tokens
        self._show(self._text().rstrip("\N{REPLACEMENT CHARACTER}"))

    def finish(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        return self._decoder.tokenizer.decode(self._tokens, skip_special_tokens=True)

    def _show(self, text: str) -> None:
        if text.startswith(self.shown) and text != self.shown:
            self._write(text[len(self.shown) :])
            self.shown = text


def run_chat(chat: Chat) -> int:
    """Read lines until /quit or the end of the input, answer each; returns the exit code."""
    at_terminal = sys.stdin.isatty()

    def write(text: str) -> None:
        print(text, end="", flush=True)

    if at_terminal:
        print(_HELP)
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if at_terminal:
                print()
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            chat.reset()
            print("[forgotten]")
        elif line.startswith("/"):
            print(f"[no command {line.split()[0]}: {_HELP}]")
        elif line:
            out = chat.answer(line, write)
            print()
            if out is None:
                print("[stopped]")
            else:
                speed = len(out.tokens) / max(out.seconds, 1e-9)
                print(f"[tau {out.acceptance_length:.2f}, {speed:.1f} tokens/s, {len(out.tokens)} tokens]")
