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
class Counts:
    """What became of some records. Counts of later records can be added."""

    records: int = 0  # that gave rows
    rows: int = 0
    left_out: int = 0  # records that their file's weight leaves out
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)  # reason -> count, first sources
    turns_unsupervised: dict[str, int] = field(default_factory=dict)  # in rows that were kept: reason -> turns
    answers: int = 0  # rows of conversations whose last answer is whole
    answers_ended: int = 0  # those of them that end in a special token
    unended: str = ""  # the end of the first that does not

    @property
    def num_skipped(self) -> int:
        """Records that gave no row."""
        return sum(entry["count"] for entry in self.skipped.values())

    def skip(self, reason: str, source: str) -> None:
        """Count one record that gave no row."""
        self._skip(reason, 1, [source])

    def add(self, other: Counts) -> None:
        """Count in what became of later records."""
        for name in ("records", "rows", "left_out", "answers", "answers_ended"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, entry in other.skipped.items():
            self._skip(reason, entry["count"], entry["sources"])
        for reason, count in other.turns_unsupervised.items():
            self.turns_unsupervised[reason] = self.turns_unsupervised.get(reason, 0) + count
        self.unended = self.unended or other.unended

    def _skip(self, reason: str, count: int, sources: list[str]) -> None:
        if reason not in self.skipped and len(self.skipped) >= _REASONS:
            reason = "other reasons"
        entry = self.skipped.setdefault(reason, {"count": 0, "sources": []})
        entry["count"] += count
        entry["sources"] += sources[: _SOURCES - len(entry["sources"])]


@dataclass(kw_only=True)
class PrepareReport(Counts):
    """Counts of one preparation; `report.json` holds them."""

    path: str
    options: dict[str, Any]
    files: list[dict[str, Any]] = field(default_factory=list)  # name, weight, records, rows, left_out, skipped
    warnings: list[str] = field(default_factory=list)
    tokens: int = 0
    supervised_tokens: int = 0
    supervised_share: float = 0.0
    lengths: dict[str, float] = field(default_factory=dict)
    max_token_id: int = -1
    content_hash: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # what the caller's `finish` added
    format_version: int = FORMAT_VERSION

    def finish(self, lengths: np.ndarray, supervised: np.ndarray, max_token_id: int, content_hash: str) -> None:
        """Fill in what is known only at the end: tokens and supervised tokens of each row, ..."""
        self.tokens, self.supervised_tokens = int(lengths.sum()), int(supervised.sum())
        self.supervised_share = self.supervised_tokens / self.tokens
        self.max_token_id, self.content_hash = max_token_id, content_hash
        quantiles = np.quantile(lengths, list(_QUANTILES.values()), method="nearest")
        self.lengths = {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())}
        self.lengths |= {name: int(value) for name, value in zip(_QUANTILES, quantiles, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the folder's own path stays out, since folders are moved."""
        result = asdict(self)
        del result["path"]
        return result | result.pop("extra")

    def __str__(self) -> str:
        lines = [f"{self.records} records kept as {self.rows} rows, {self.num_skipped} skipped"]
        for reason, entry in sorted(self.skipped.items(), key=lambda item: -item[1]["count"]):
            more = ", ..." if entry["count"] > len(entry["sources"]) else ""
            lines.append(f"  {entry['count']:>7}  {reason}  ({', '.join(entry['sources'])}{more})")
        for reason, count in self.turns_unsupervised.items():
            lines.append(f"  {count:>7}  turns left unsupervised in kept rows: {reason}")
        if any(file["weight"] != 1 for file in self.files):
            lines += [
                f"  {file['name']}: weight {file['weight']:g}, {file['records']} records taken as {file['rows']} rows, "
                f"{file['left_out']} left out by the weight"
                for file in self.files
            ]
        return "\n".join(lines)
