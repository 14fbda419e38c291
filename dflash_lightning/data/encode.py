"""Supervised texts as token ids and loss mask: one tokenization a text, boundaries from its offsets.

The ids are those of `apply_chat_template(tokenize=True)`, with one exception. Where a token holds the end of the
generation prompt and the start of the answer (an answer that begins with a newline behind a header that ends with
one), no mask of those ids is right; there the text is tokenized in two pieces, as the engine does. A turn for which
that is impossible is left unsupervised.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .turns import Span, SupervisedText

_CHECKED = 16  # texts whose ids are compared with the tokenizer's own call before the fast path is trusted
_STRADDLES = "a token holds the end of the template's text and the start of an assistant turn"


class _Straddle(Exception):  # noqa: N818  (control flow of this file)
    """A token lies on both sides of a span's start."""


class Encoder:
    """A tokenizer without its post-processing: exact offsets and no special tokens added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.checks_left = _CHECKED
        self.fast: Any = None
        if getattr(tokenizer, "is_fast", False):
            # A copy, since these settings are the user's. Byte-level post-processors trim white space off the
            # offsets, which hides tokens that straddle a boundary; the ids do not change without them.
            self.fast = copy.deepcopy(tokenizer.backend_tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
            self.fast.post_processor = None
            self.fast.no_truncation()
            self.fast.no_padding()
            self.fast.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text, as `apply_chat_template(tokenize=True)` makes them."""
        if self.fast is not None and self.checks_left <= 0:
            return self.fast.encode(text, add_special_tokens=False).ids
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]

    def encode(self, texts: Sequence[str]) -> list[tuple[np.ndarray, Any]]:
        """Ids [T] int32 and offsets object (None for a tokenizer without offsets) of each text."""
        if self.fast is not None:
            encodings = self.fast.encode_batch(list(texts), add_special_tokens=False)
            for text, encoding in zip(texts[: max(self.checks_left, 0)], encodings, strict=False):
                if encoding.ids != self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
                    self.fast = None  # a tokenizer class with its own ways; its call alone is right
                    break
                self.checks_left -= 1
            else:
                return [(np.array(encoding.ids, dtype=np.int32), encoding) for encoding in encodings]
        return [(np.array(self.ids(text), dtype=np.int32), None) for text in texts]

    def row(self, text: SupervisedText, ids: np.ndarray, offsets: Any) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Ids [T], mask [T] uint8 over the text's spans, and why spans were left out."""
        mask, cuts = self._mask(text, ids, offsets, exact=False)
        if not cuts:
            return ids, mask, []
        pieces = self._pieces(text, cuts)
        if pieces is not None and self._decode(pieces[0]) == self._decode(ids):
            return *pieces, []
        mask, cuts = self._mask(text, ids, offsets, exact=True)
        return ids, mask, [_STRADDLES] * len(cuts)

    def _mask(self, text: SupervisedText, ids: np.ndarray, offsets: Any, exact: bool) -> tuple[np.ndarray, list[int]]:
        """Mask [T] uint8, and where the spans start that it leaves out since a token straddles that place.

        Offsets tell too many of them; `exact` tokenizes the text before each, which costs as much as the row itself.
        """
        mask = np.zeros(len(ids), dtype=np.uint8)
        cuts: list[int] = []
        for span in text.spans:
            try:
                first, last = self._tokens(text.text, span, ids, offsets, exact)
                mask[first:last] = 1
            except _Straddle:
                cuts.append(span.start)
        return mask, cuts

    def _pieces(self, text: SupervisedText, cuts: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """The text tokenized apart at `cuts`, as the engine does: a prompt first, then what the target writes."""
        edges = [0, *(cut for cut in cuts if cut), len(text.text)]
        pieces = [text.text[start:end] for start, end in pairwise(edges)]
        all_ids, all_masks = [], []
        for start, piece, (ids, offsets) in zip(edges, pieces, self.encode(pieces), strict=False):
            mask = np.zeros(len(ids), dtype=np.uint8)
            for span in text.spans:
                if start <= span.start < start + len(piece):
                    moved = Span(span.start - start, span.stop - start, span.end - start)
                    try:
                        first, last = self._tokens(piece, moved, ids, offsets, exact=True)
                    except _Straddle:
                        return None
                    mask[first:last] = 1
            all_ids.append(ids)
            all_masks.append(mask)
        return np.concatenate(all_ids), np.concatenate(all_masks)

    def _decode(self, ids: np.ndarray) -> Any:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens(self, text: str, span: Span, ids: np.ndarray, offsets: Any, exact: bool) -> tuple[int, int]:
        """Tokens [first, last) of a span."""
        if offsets is None:
            return self._boundary(text, span.start, ids), self._boundary(text, span.end, ids)
        first = _token_at(offsets, span.start, len(text), len(ids))
        if first < len(ids) and offsets.token_to_chars(first)[0] < span.start:
            if not exact:
                raise _Straddle
            first = self._boundary(text, span.start, ids)
        if span.stop < span.end:
            token = _token_at(offsets, span.stop, len(text), len(ids))
            # One token, white space around it included where the token swallows it; or the end text's own tokens.
            if token < len(ids):
                end = offsets.token_to_chars(token)[1]
                if end >= span.end and not text[span.end : end].strip():
                    return first, token + 1
        # A token that straddles the end holds text of the template: left out.
        return first, _token_at(offsets, span.end, len(text), len(ids))

    def _boundary(self, text: str, position: int, ids: np.ndarray) -> int:
        before = self.ids(text[:position]) if position else []
        if before != ids[: len(before)].tolist():
            raise _Straddle
        return len(before)


def _token_at(offsets: Any, position: int, length: int, num_tokens: int) -> int:
    """First token that covers the character at `position` or, where none does, one behind it."""
    while position < length:
        token = offsets.char_to_token(position)
        if token is not None:
            return token
        position += 1
    return num_tokens
