"""The rows that a run trains and validates on: files or prepared folders in, a folder and usable row lengths out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from dflash_lightning.data import dataset_fingerprint, ensure_rows, held_out, load_rows
from dflash_lightning.data.usable import usable_lengths
from dflash_lightning.target.resolve import cache_root, load_target_config, load_tokenizer


@dataclass(frozen=True)
class RowSet:
    """One set of rows: its prepared folder, its content's hash, tokens of each row (0: left out)."""

    folder: str
    fingerprint: str
    lengths: np.ndarray


def check_val_fraction(option: str, value: float) -> None:
    """Raise ValueError, which names the option, where `value` is no share that can be held out."""
    if not 0 <= value < 1:
        raise ValueError(f"{option}={value}: a share of the train rows, 0 (none) up to below 1")


@dataclass(frozen=True)
class RowSets:
    """Where the train and validation rows of a run come from. Arguments as in `HiddenStateDataModule`."""

    target: str
    train: Sequence[str]
    val: Sequence[str]
    max_seq_len: int
    min_supervised_tokens: int
    trust_remote_code: bool
    train_weights: Sequence[float] | None = None
    val_fraction: float = 0.0
    # Both sides of a split lie in one folder: what is found of it is kept.
    _found: dict[tuple[str, str, int | None], RowSet] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_val_fraction("data.val_fraction", self.val_fraction)
        if self.val_fraction and self.val:
            raise ValueError(
                f"data.val={list(self.val)} and data.val_fraction={self.val_fraction}: both say what to validate on; "
                "give one of them"
            )

    @property
    def has_val(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.val) or self.val_fraction > 0

    def ensure(self) -> dict[str, str]:
        """Prepare raw files that are not prepared yet; the folder of each set ("train", "val").

        With `val_fraction` both sets are rows of one folder.
        """
        folders = {}
        tokenizer = load_tokenizer(self.target, self.trust_remote_code)
        for name, files in (("train", self.train), ("val", self.val)):
            if files:
                folders[name] = str(
                    ensure_rows(
                        files,
                        tokenizer,
                        Path(cache_root()) / "rows",
                        max_seq_len=self.max_seq_len,
                        min_supervised_tokens=self.min_supervised_tokens,
                        vocab_size=self._vocab_size(),
                        weights=self.train_weights if name == "train" else None,
                        option=f"data.{name}",
                    )
                )
        if self.val_fraction:
            folders["val"] = folders["train"]
        return folders

    def load(self, name: str, folder: str, mask_token_id: int | None) -> RowSet:
        """The set `name` of a folder that `ensure` gave. Warns of rows that are left out.

        Raises ValueError when no row is left, also for one side of a split.
        """
        option = "data.train" if self.val_fraction else f"data.{name}"
        key = (folder, option, mask_token_id)
        if key not in self._found:
            self._found[key] = self._scan(*key)
        found = self._found[key]
        return replace(found, lengths=self._side(name, folder, found.lengths)) if self.val_fraction else found

    def _scan(self, folder: str, option: str, mask_token_id: int | None) -> RowSet:
        rows = load_rows(folder, option)
        lengths, left_out = usable_lengths(
            rows,
            max_seq_len=self.max_seq_len,
            min_supervised_tokens=self.min_supervised_tokens,
            mask_token_id=mask_token_id,
            vocab_size=self._vocab_size(),
            option=option,
        )
        if left_out:
            rank_zero_warn(left_out)
        return RowSet(folder, dataset_fingerprint(rows), lengths)

    def _side(self, name: str, folder: str, lengths: np.ndarray) -> np.ndarray:
        """`lengths` with 0 for the rows of the other side of the split."""
        rows: Any = load_rows(folder, "data.train")
        groups = rows.data.column("group").to_numpy()
        val = held_out(groups, self.val_fraction)
        ours = lengths * (val if name == "val" else ~val)
        if not ours.any():
            where = "validation" if name == "val" else "training"
            raise ValueError(
                f"data.val_fraction={self.val_fraction}: no row is left for {where}; data.train has "
                f"{int((lengths > 0).sum())} usable rows of {len(np.unique(groups[lengths > 0]))} different prompts, "
                "which are never divided"
            )
        return ours

    def _vocab_size(self) -> int:
        return load_target_config(self.target, self.trust_remote_code).get_text_config().vocab_size
