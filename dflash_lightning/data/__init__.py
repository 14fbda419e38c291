"""Conversations to training rows: readers, the target's own rendering, loss masks, prepared folders.

`datasets` is imported only inside the functions that need it.
"""

from .identity import held_out
from .messages import Message, SkipRow, normalize_messages, parse_record
from .prepare import ensure_rows, prepare_rows, tokenizer_fingerprint
from .readers import Record, read_records, resolve_files
from .render import Renderer, Row, render_row
from .report import PrepareReport
from .rows import dataset_fingerprint, is_prepared, load_rows, read_report
from .show import show_rows

__all__ = [
    "Message",
    "PrepareReport",
    "Record",
    "Renderer",
    "Row",
    "SkipRow",
    "dataset_fingerprint",
    "ensure_rows",
    "held_out",
    "is_prepared",
    "load_rows",
    "normalize_messages",
    "parse_record",
    "prepare_rows",
    "read_records",
    "read_report",
    "render_row",
    "resolve_files",
    "show_rows",
    "tokenizer_fingerprint",
]
