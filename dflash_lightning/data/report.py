"""What `prepare_rows` kept, skipped and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .rows import FORMAT_VERSION

_SOURCES = 5  # first sources named with each reason
_REASONS = 100  # different reasons told apart; a template's message may hold the row's own text
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class PrepareReport:
    """Counts of one preparation; `report.json` holds them."""

    path: str
    options: dict[str, Any]
    records: int = 0  # records that gave rows
    rows: int = 0
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)  # reason -> count, first sources
    turns_unsupervised: dict[str, int] = field(default_factory=dict)  # in rows that were kept: reason -> turns
    tokens: int = 0
    supervised_tokens: int = 0
    supervised_share: float = 0.0
    lengths: dict[str, float] = field(default_factory=dict)
    max_token_id: int = -1
    content_hash: str = ""
    files: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION

    @property
    def num_skipped(self) -> int:
        """Records that gave no row."""
        return sum(entry["count"] for entry in self.skipped.values())

    def skip(self, reason: str, source: str) -> None:
        """Count one record that gave no row."""
        if reason not in self.skipped and len(self.skipped) >= _REASONS:
            reason = "other reasons"
        entry = self.skipped.setdefault(reason, {"count": 0, "sources": []})
        entry["count"] += 1
        if len(entry["sources"]) < _SOURCES:
            entry["sources"].append(source)

    def finish(self, lengths: np.ndarray, tokens: int, supervised: int, content_hash: str) -> None:
        """Fill in what is known only at the end."""
        self.tokens, self.supervised_tokens, self.supervised_share = tokens, supervised, supervised / tokens
        self.content_hash = content_hash
        quantiles = np.quantile(lengths, list(_QUANTILES.values()), method="nearest")
        self.lengths = {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())}
        self.lengths |= {name: int(value) for name, value in zip(_QUANTILES, quantiles, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the folder's own path stays out, since folders are moved."""
        result = asdict(self)
        del result["path"]
        return result

    def __str__(self) -> str:
        lines = [f"{self.records} records kept as {self.rows} rows, {self.num_skipped} skipped"]
        for reason, entry in sorted(self.skipped.items(), key=lambda item: -item[1]["count"]):
            more = ", ..." if entry["count"] > len(entry["sources"]) else ""
            lines.append(f"  {entry['count']:>7}  {reason}  ({', '.join(entry['sources'])}{more})")
        for reason, count in self.turns_unsupervised.items():
            lines.append(f"  {count:>7}  turns left unsupervised in kept rows: {reason}")
        return "\n".join(lines)

    def print(self) -> None:
        """The summary, as plain lines on the terminal."""
        print(self)
