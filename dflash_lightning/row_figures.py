"""What prepared rows look like to a run, as numbers, text and picture: lengths, supervised shares, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_lightning.producer.plan import BatchPlan

PICTURE = "report.png"
_BINS = 48  # of the length histogram, of equal width on a logarithmic scale
_SHARE_BINS = 20

_REAL, _SUPERVISED, _PADDING, _GRID = (158, 193, 226), (31, 119, 180), (231, 163, 145), (225, 225, 225)
_WIDTH, _MARGIN, _PANEL, _HEAD, _LINE = 1200, 70, 250, 96, 34


def row_figures(
    lengths: NDArray[np.integer], supervised: NDArray[np.integer], *, token_budget: int, num_buckets: int
) -> dict[str, Any]:
    """Plain numbers for `report.json`: `histogram`, `supervised_shares`, `buckets` and `plan`.

    Args:
        lengths, supervised: tokens and supervised tokens of each row.
        token_budget, num_buckets: of the batch plan, as a run would have them.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, _BINS + 1).round().astype(np.int64))
    rows, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    trained, _ = np.histogram(lengths, edges, weights=supervised)
    shares, _ = np.histogram(supervised / lengths, np.linspace(0, 1, _SHARE_BINS + 1))
    plan = BatchPlan(lengths, token_budget=token_budget, num_buckets=num_buckets)
    return {
        "histogram": {
            "edges": edges.tolist(),  # bin i holds lengths from edges[i] up to below edges[i + 1]
            "rows": rows.tolist(),
            "tokens": tokens.astype(int).tolist(),
            "supervised_tokens": trained.astype(int).tolist(),
        },
        "supervised_shares": {"rows": shares.tolist()},  # 20 bins from 0 to 1
        "buckets": _buckets(np.sort(lengths), token_budget, num_buckets),
        "plan": {
            "token_budget": token_budget,
            "num_buckets": num_buckets,
            "batches": len(plan),
            "padding": round(plan.padding_waste(), 5),
        },
    }


def _buckets(lengths: NDArray[np.int64], token_budget: int, num_buckets: int) -> list[dict[str, Any]]:
    """The plan's buckets, of about equal token counts; batches never mix them, so each is a plan of its own."""
    tokens = np.cumsum(lengths)
    bounds = np.searchsorted(tokens, tokens[-1] * np.arange(1, num_buckets) / num_buckets)
    buckets = []
    for part in np.split(lengths, bounds):
        if len(part):
            plan = BatchPlan(part, token_budget=token_budget, num_buckets=1)
            bucket = {"shortest": int(part[0]), "longest": int(part[-1]), "rows": len(part), "tokens": int(part.sum())}
            buckets.append(bucket | {"batches": len(plan), "padding": round(plan.padding_waste(), 5)})
    return buckets


def figures_text(report: dict[str, Any]) -> str:
    """The figures of a `report.json` as lines for a terminal."""
    counts = report["histogram"]["rows"]
    blocks = " ▁▂▃▄▅▆▇█"
    bars = "".join(blocks[-(-count * (len(blocks) - 1) // max(counts))] for count in counts)
    plan = report["plan"]
    lines = [
        _summary(report),
        f"rows by length, {report['lengths']['min']:,} |{bars}| {report['lengths']['max']:,} tokens (log scale)",
        f"{plan['batches']:,} batches of at most {plan['token_budget']:,} tokens, {plan['padding']:.1%} padding",
        f"{'tokens of a row':>17} {'rows':>11} {'tokens':>14} {'batches':>9} {'padding':>8}",
    ]
    for bucket in report["buckets"]:
        span = f"{bucket['shortest']:,} - {bucket['longest']:,}"
        rows, tokens, batches = (f"{bucket[name]:,}" for name in ("rows", "tokens", "batches"))
        lines.append(f"{span:>17} {rows:>11} {tokens:>14} {batches:>9} {bucket['padding']:>8.1%}")
    return "\n".join(lines)


def _summary(report: dict[str, Any]) -> str:
    lengths = report["lengths"]
    spread = ", ".join(
        f"{name} {lengths[key]:,}" for name, key in (("median", "p50"), ("90 %", "p90"), ("99 %", "p99"))
    )
    counts = f"{report['rows']:,} rows, {report['tokens']:,} tokens, {report['supervised_share']:.1%} supervised"
    return f"{counts}; tokens of a row: mean {lengths['mean']:,.0f}, {spread}, longest {lengths['max']:,}"


def write_picture(file: Path, report: dict[str, Any]) -> None:
    """Draw the figures of a `report.json` as a PNG."""
    from PIL import Image  # comes with tensorboard

    buckets = report["buckets"]
    height = _HEAD + 2 * (_PANEL + 90) + len(buckets) * _LINE + 80
    canvas = _Canvas(Image.new("RGB", (_WIDTH, height), "white"))
    canvas.text(_MARGIN, 20, "Prepared rows", size=24)
    canvas.text(_MARGIN, 56, _summary(report), size=14)
    top = _HEAD + 34
    _lengths_panel(canvas, top, report["histogram"])
    top += _PANEL + 90
    _shares_panel(canvas, top, report["supervised_shares"]["rows"])
    _buckets_panel(canvas, top + _PANEL + 74, report)
    canvas.image.save(file)


class _Canvas:
    def __init__(self, image: Any) -> None:
        from PIL import ImageDraw

        self.image = image
        self.draw = ImageDraw.Draw(image)

    def text(self, x: float, y: float, text: str, size: int = 13, anchor: str = "la", fill: Any = (40, 40, 40)) -> None:
        from PIL import ImageFont

        self.draw.text((x, y), text, fill=fill, font=ImageFont.load_default(size), anchor=anchor)

    def bar(self, left: float, top: float, right: float, bottom: float, fill: Any) -> None:
        left, top, right, bottom = map(round, (left, top, right, bottom))
        if bottom > top:  # PIL counts the last pixel in
            self.draw.rectangle((left, top, max(right - 1, left), bottom - 1), fill=fill)

    def legend(self, y: float, entries: list[tuple[Any, str]]) -> None:
        x = _WIDTH - _MARGIN
        for fill, name in reversed(entries):
            x -= 7 * len(name) + 10
            self.bar(x, y + 2, x + 12, y + 14, fill)
            self.text(x + 18, y, name)
            x -= 24

    def scale(self, top: float, most: float) -> float:
        """Four grid lines over a panel whose bars reach `most`; pixels a unit."""
        power = 10 ** np.floor(np.log10(most / 4))
        step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size * 4 >= most)
        for part in range(5):
            y = top + _PANEL * (1 - part / 4)
            self.draw.line([(_MARGIN, y), (_WIDTH - _MARGIN, y)], fill=_GRID)
            self.text(_MARGIN - 8, y, _short(step * part), size=12, anchor="rm")
        return float(_PANEL / (4 * step))


def _lengths_panel(canvas: _Canvas, top: float, histogram: dict[str, list[int]]) -> None:
    rows, edges = histogram["rows"], histogram["edges"]
    canvas.text(_MARGIN, top - 32, "Rows by length", size=16)
    canvas.legend(top - 30, [(_SUPERVISED, "supervised share of their tokens"), (_REAL, "the rest")])
    unit = canvas.scale(top, max(rows))
    position = np.log(np.array(edges, dtype=float))
    position = _MARGIN + (position - position[0]) / (position[-1] - position[0]) * (_WIDTH - 2 * _MARGIN)
    bottom = top + _PANEL
    for number, count in enumerate(rows):
        left, right, height = position[number], position[number + 1] - 1, unit * count
        share = histogram["supervised_tokens"][number] / max(histogram["tokens"][number], 1)
        canvas.bar(left, bottom - height, right, bottom, _REAL)
        canvas.bar(left, bottom - height * share, right, bottom, _SUPERVISED)
    shown = -np.inf
    for edge, x in zip(edges, position, strict=True):
        if x - shown > 70:
            canvas.text(x, bottom + 8, f"{edge:,}", size=12, anchor="ma")
            shown = x
    canvas.text(_WIDTH / 2, bottom + 26, "tokens (log scale)", size=12, anchor="ma")


def _shares_panel(canvas: _Canvas, top: float, shares: list[int]) -> None:
    canvas.text(_MARGIN, top - 32, "Rows by supervised share of their tokens", size=16)
    unit = canvas.scale(top, max(shares))
    step, bottom = (_WIDTH - 2 * _MARGIN) / len(shares), top + _PANEL
    for number, count in enumerate(shares):
        left = _MARGIN + number * step
        canvas.bar(left, bottom - unit * count, left + step - 1, bottom, _SUPERVISED)
    for part in range(0, 101, 10):
        canvas.text(_MARGIN + part / 100 * (_WIDTH - 2 * _MARGIN), bottom + 8, f"{part} %", size=12, anchor="ma")


def _buckets_panel(canvas: _Canvas, top: float, report: dict[str, Any]) -> None:
    plan, buckets = report["plan"], report["buckets"]
    title = f"Length buckets: {plan['batches']:,} batches of at most {plan['token_budget']:,} tokens"
    canvas.text(_MARGIN, top - 8, f"{title}, {plan['padding']:.1%} padding", size=16)
    canvas.legend(top - 6, [(_REAL, "tokens"), (_PADDING, "padding")])
    left, right = 260, _WIDTH - 330
    most = max(bucket["tokens"] / (1 - bucket["padding"]) for bucket in buckets)
    for number, bucket in enumerate(buckets):
        y = top + 24 + number * _LINE
        padded = bucket["tokens"] / (1 - bucket["padding"])
        middle = left + (right - left) * bucket["tokens"] / most
        canvas.text(left - 12, y + 12, f"{bucket['shortest']:,} - {bucket['longest']:,} tokens", anchor="rm")
        canvas.bar(left, y, middle, y + 24, _REAL)
        if bucket["padding"]:
            canvas.bar(middle, y, left + (right - left) * padded / most, y + 24, _PADDING)
        counts = f"{bucket['rows']:,} rows, {bucket['batches']:,} batches, {bucket['padding']:.1%} padding"
        canvas.text(right + 12, y + 12, counts, anchor="lm")


def _short(value: float) -> str:
    for size, mark in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}"
