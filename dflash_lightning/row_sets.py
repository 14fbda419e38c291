"""The rows that a run trains and validates on: files or prepared folders in, a folder and usable row lengths out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from dflash_lightning.data import dataset_fingerprint, ensure_rows, load_rows
from dflash_lightning.data.usable import usable_lengths
from dflash_lightning.target.resolve import cache_root, load_target_config, load_tokenizer


@dataclass(frozen=True)
class RowSet:
    """One set of rows: its prepared folder, its content's hash, tokens of each row (0: left out)."""

    folder: str
    fingerprint: str
    lengths: np.ndarray


@dataclass(frozen=True)
class RowSets:
    """Where the train and validation rows of a run come from. Arguments as in `HiddenStateDataModule`."""

    target: str
    train: Sequence[str]
    val: Sequence[str]
    max_seq_len: int
    min_supervised_tokens: int
    trust_remote_code: bool

    def ensure(self) -> dict[str, str]:
        """Prepare raw files that are not prepared yet; the folder of each set ("train", "val")."""
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
                        option=f"data.{name}",
                    )
                )
        return folders

    def load(self, name: str, folder: str, mask_token_id: int | None) -> RowSet:
        """The set `name` of a folder that `ensure` gave. Warns of rows that are left out."""
        rows = load_rows(folder)
        lengths, left_out = usable_lengths(
            rows,
            max_seq_len=self.max_seq_len,
            min_supervised_tokens=self.min_supervised_tokens,
            mask_token_id=mask_token_id,
            vocab_size=self._vocab_size(),
            option=f"data.{name}",
        )
        if left_out:
            rank_zero_warn(left_out)
        return RowSet(folder, dataset_fingerprint(rows), lengths)

    def _vocab_size(self) -> int:
        return load_target_config(self.target, self.trust_remote_code).get_text_config().vocab_size
