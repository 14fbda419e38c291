"""Rows decoded for a person: supervised text in colour, so that a wrong mask or template shows at once."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from datasets import Dataset

_LONGEST = 2000  # characters shown of a run of one colour; its middle is left out


def show_rows(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, n: int = 3, console: Console | None = None) -> None:
    """Print the first `n` rows decoded, supervised text in green, the rest dimmed; `|` stands where a run begins."""
    console = console or Console()
    for number in range(min(n, len(dataset))):
        row = cast(dict[str, Any], dataset[number])
        mask = np.asarray(row["loss_mask"], dtype=bool)
        ids = row["input_ids"]
        console.rule(f"row {number} from {row.get('source', '?')}: {len(ids)} tokens, {int(mask.sum())} supervised")
        console.print(decoded(ids, mask, tokenizer), soft_wrap=True, highlight=False)


def decoded(ids: list[int], mask: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The row's text with its supervised runs in colour. Runs are decoded apart, special tokens shown."""
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(np.int8))) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        if start == end:
            continue
        run = cast(str, tokenizer.decode(ids[start:end], skip_special_tokens=False))
        if len(run) > _LONGEST:
            run = f"{run[: _LONGEST // 2]} [...] {run[-_LONGEST // 2 :]}"
        # The bar tells runs apart where the terminal shows no colours.
        text.append(f"|{run}|" if mask[start] else run, style="bold green" if mask[start] else "dim")
    return text
