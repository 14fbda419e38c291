"""Records as rows: the target's own rendering, token ids and loss mask, truncated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from .encode import Encoder
from .messages import Chat, Message, PlainText, ReadyRow, SkipRow, normalize_messages
from .template import ChatTemplate
from .turns import Span, SupervisedText, supervised_texts

Plan = list[SupervisedText] | SkipRow | ReadyRow


class Row(NamedTuple):
    """One training row: `input_ids` [T] int32 and `loss_mask` [T] uint8, 1 = a token the target would generate."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


class Renderer:
    """Renders and tokenizes records with one tokenizer.

    `notes` counts turns that were left unsupervised inside rows that were kept, by reason.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_seq_len: int,
        min_supervised_tokens: int = 2,
        mask_token_id: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.min_supervised_tokens = min_supervised_tokens
        self.mask_token_id = mask_token_id
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.mask_token_reason = f"contains the mask token id {mask_token_id}"
        self.encoder = Encoder(tokenizer)
        self.notes: Counter[str] = Counter()
        self._templates: dict[str, ChatTemplate] = {}

    def arguments(self) -> dict[str, Any]:
        """What makes the same renderer in another process."""
        names = ("tokenizer", "max_seq_len", "min_supervised_tokens", "mask_token_id", "vocab_size")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def stop_ids(self) -> set[int]:
        """Ids of the special tokens, one of which ends an answer when the chat template is the tokenizer's own."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return special | {i for i in (self.tokenizer.eos_token_id,) if isinstance(i, int)}

    def template(self, tools: Any = None) -> ChatTemplate:
        """The chat template for conversations with or without tools, probed once."""
        current = self.tokenizer.chat_template
        key = current if isinstance(current, str) else f"named, {tools is not None}"
        if key not in self._templates:
            self._templates[key] = ChatTemplate(self.tokenizer, tools)
        return self._templates[key]

    def texts(self, record: Chat | PlainText) -> list[SupervisedText]:
        """The texts to tokenize for one record. Raises SkipRow."""
        if isinstance(record, Chat):
            return supervised_texts(self.template(record.tools), record.messages, record.tools, self.notes)
        if not record.text.strip():
            raise SkipRow("the text is empty")
        try:
            record.text.encode()
        except UnicodeEncodeError:
            raise SkipRow("the text is not valid Unicode (a lone surrogate)") from None
        # The tokenizer's own BOS where it adds one and the text has none; it is no text of the target's.
        bos = self._own_bos
        text = record.text if record.text.startswith(bos) else bos + record.text
        return [SupervisedText(text, 0, [Span(len(bos), len(text), len(text))])]

    @cached_property
    def _own_bos(self) -> str:
        """The BOS that the tokenizer puts before every text, "" if it does not."""
        bos = str(self.tokenizer.bos_token or "")
        ids = self.tokenizer("a")["input_ids"]
        return bos if bos and ids[:1] == [self.tokenizer.bos_token_id] else ""  # pyright: ignore[reportIndexIssue]

    def rows(self, records: Sequence[Chat | PlainText | ReadyRow]) -> Iterator[list[Row] | SkipRow]:
        """For each record its rows, or why there are none. Tokenizes all records in one call."""
        plans = self.plan(records)
        return self.finish(plans, self.encode(plans))

    def plan(self, records: Sequence[Chat | PlainText | ReadyRow]) -> list[Plan]:
        """First step: what to tokenize for each record."""
        plans: list[Plan] = []
        for record in records:
            try:
                plans.append(record if isinstance(record, ReadyRow) else self.texts(record))
            except SkipRow as skip:
                plans.append(skip)
        return plans

    def encode(self, plans: Sequence[Plan]) -> list[tuple[np.ndarray, Any]]:
        """Second step: tokenize. Runs without Python's global lock, so that a thread may do it beside the others."""
        return self.encoder.encode([text.text for plan in plans if isinstance(plan, list) for text in plan])

    def finish(
        self, plans: Sequence[Plan], encodings: Sequence[tuple[np.ndarray, Any]]
    ) -> Iterator[list[Row] | SkipRow]:
        """Third step: masks, truncation and checks."""
        encoded = iter(encodings)
        for plan in plans:
            if isinstance(plan, SkipRow):
                yield plan
            elif isinstance(plan, ReadyRow):
                row = Row(np.array(plan.input_ids, dtype=np.int32), np.array(plan.loss_mask, dtype=np.uint8))
                yield self._checked([row], [])
            else:
                rows, faults = [], []
                for text in plan:
                    ids, offsets = next(encoded)
                    ids, mask, new_faults = self.encoder.row(text, ids, offsets)
                    rows.append(Row(ids, mask))
                    faults += new_faults
                yield self._checked(rows, faults)

    def _checked(self, rows: list[Row], faults: list[str]) -> list[Row] | SkipRow:
        """The rows that can be trained on, cut to `max_seq_len`; the first reason when there is none."""
        kept, reasons = [], []
        for row in rows:
            reason = self._fault(row)
            if reason:
                reasons.append(reason)
            else:
                kept.append(Row(row.input_ids[: self.max_seq_len], row.loss_mask[: self.max_seq_len]))
        if not kept:
            return SkipRow((faults or reasons)[0])
        self.notes.update(faults + reasons)
        return kept

    def _fault(self, row: Row) -> str:
        ids, mask = row.input_ids[: self.max_seq_len], row.loss_mask[: self.max_seq_len]
        supervised = int(mask.sum())
        if supervised == 0 and row.loss_mask.any():
            return f"no supervised tokens left after truncation to {self.max_seq_len}"
        if supervised < self.min_supervised_tokens or supervised == 0:
            cut = f" left after truncation to {self.max_seq_len}" if row.loss_mask.sum() > supervised else ""
            return f"fewer than {max(self.min_supervised_tokens, 1)} supervised tokens{cut}"
        if ids.max() >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        if self.mask_token_id is not None and (ids == self.mask_token_id).any():
            return self.mask_token_reason
        return ""


_last: list[Renderer] = []  # of the last call to render_row: making one copies the tokenizer


def render_row(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    max_seq_len: int,
    min_supervised_tokens: int = 1,
) -> list[Row]:
    """The rows of one conversation: one, or one a turn when the template rewrites earlier turns.

    Raises SkipRow when the conversation cannot be used.
    """
    if not _last or _last[0].tokenizer is not tokenizer or _last[0].vocab_size != len(tokenizer):
        _last[:] = [Renderer(tokenizer, max_seq_len=max_seq_len)]
    renderer = _last[0]
    renderer.max_seq_len, renderer.min_supervised_tokens = max_seq_len, min_supervised_tokens
    (result,) = renderer.rows([Chat(normalize_messages(messages), tools)])
    if isinstance(result, SkipRow):
        raise result
    return result
