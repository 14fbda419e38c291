"""Stable numbers for records: which rows stay together in a split, and whether a fractional weight takes a record.

Both follow from a record's content alone: the same in every file, order and run.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .messages import Chat, PlainText, ReadyRow, SkipRow

GROUPS = 2**64  # groups are 0 .. 2**64 - 1, evenly spread
_BEGINNING = 1000  # characters, or ids, of a row without a prompt that tell it from others


def group_of(record: Chat | PlainText | ReadyRow) -> int:
    """Group of a record's rows, uint64: equal for all answers to one prompt.

    Hash of the messages before the first answer; of a text's beginning; of the ids before the first supervised one.
    A row of a prepared folder keeps the group that it has.
    """
    if isinstance(record, ReadyRow):
        if record.group is not None:
            return record.group
        prompt = record.loss_mask.index(1) if 1 in record.loss_mask else len(record.loss_mask)
        return _hash("group", record.input_ids[: prompt or _BEGINNING])
    if isinstance(record, PlainText):
        return _hash("group", record.text[:_BEGINNING])
    # An answer before any message answers nothing; what follows it tells conversations apart.
    answers = (i for i, message in enumerate(record.messages) if i and message["role"] == "assistant")
    return _hash("group", record.messages[: next(answers, len(record.messages))])


def times_taken(record: Chat | PlainText | ReadyRow, weight: float) -> int:
    """How often a record of a file with `weight` is taken: its whole part, and once more for that share of records."""
    whole = int(weight)
    if weight == whole:
        return whole
    if isinstance(record, Chat):
        content: Any = [record.messages, record.tools]
    else:
        content = record.text if isinstance(record, PlainText) else record.input_ids
    return whole + (_hash("weight", content) < (weight - whole) * GROUPS)


def held_out(groups: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which rows are held out for validation: a larger fraction keeps those of a smaller one."""
    return groups < np.uint64(min(int(fraction * GROUPS), GROUPS - 1))


def _hash(purpose: str, content: Any) -> int:
    # Columnar files may hold values that are no JSON (dates, bytes); their text serves as well.
    try:
        text = json.dumps(content, sort_keys=True, default=str)
    except RecursionError:
        raise SkipRow("values are nested too deeply") from None
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest(), "little")
