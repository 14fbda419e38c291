"""Conversations to a prepared folder: read, render, tokenize, write, report. One pass, flat memory, atomic."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .messages import EXPECTED, NO_COLUMN, SkipRow, parse_record
from .readers import Record, read_records, resolve_files
from .render import Plan, Renderer
from .report import PrepareReport
from .rows import FORMAT_VERSION, is_prepared, load_rows
from .writer import RowWriter

_CHUNK = 256  # records tokenized in one call; the tokenizer spreads them over the cores
_MOST_WITH_MASK_TOKEN = 0.01  # share of the records; above it the mask token is a token of the language


def prepare_rows(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    *,
    max_seq_len: int,
    min_supervised_tokens: int = 2,
    mask_token_id: int | None = None,
    vocab_size: int | None = None,
    option: str = "data.train",
    progress: bool = True,
) -> PrepareReport:
    """Render and tokenize every record of the files into the prepared folder `out_dir`.

    `vocab_size` is the target's (default: the tokenizer's). The folder appears whole or not at all; a prepared folder
    that stands there is replaced. Raises FileNotFoundError or ValueError, naming files and `option`, when a file is
    missing, empty or unreadable, has no usable column, or no row of all files can be used.
    """
    _check_options(max_seq_len, min_supervised_tokens)
    renderer = Renderer(
        tokenizer,
        max_seq_len=max_seq_len,
        min_supervised_tokens=min_supervised_tokens,
        mask_token_id=mask_token_id,
        vocab_size=vocab_size,
    )
    out_dir = Path(out_dir)
    if out_dir.exists() and not is_prepared(out_dir) and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"{str(out_dir)!r} exists and is no prepared folder; give another one")
    return _prepare(resolve_files(paths, option), renderer, out_dir, option, progress, replace=True)


def _prepare(
    files: list[Path], renderer: Renderer, out_dir: Path, option: str, progress: bool, replace: bool
) -> PrepareReport:
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target folder, so that the last step is one rename in one file system.
    temporary = out_dir.parent / f".{out_dir.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    writer = RowWriter(temporary)
    try:
        report = PrepareReport(path=str(out_dir), options=_options(renderer))
        with tqdm(desc="prepare", unit=" rows", disable=not progress, leave=False) as bar:
            for file, name in zip(files, _names(files), strict=True):
                _prepare_file(file, name, option, renderer, writer, report, bar)
        _check_mask_token(renderer, report, option)
        if report.rows == 0:
            raise ValueError(f"{option}: no row of {', '.join(map(repr, map(str, files)))} can be used:\n{report}")
        report.turns_unsupervised = dict(renderer.notes)
        writer.finish(report)
        _move(temporary, out_dir, replace)
    finally:
        writer.close()
        shutil.rmtree(temporary, ignore_errors=True)
    if progress and report.num_skipped:
        report.print()
    return report


def ensure_rows(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: str | Path,
    **options: Any,
) -> Path:
    """The prepared folder for `paths`: a prepared folder as it is, else files prepared once into `cache_dir`.

    The cache's key is the files' content, the chat template, the tokenizer and the options (those of `prepare_rows`),
    so that a changed file or template is prepared anew. Safe when several processes call it at once.
    """
    option = options.get("option", "data.train")
    files = resolve_files(paths, option)
    if len(files) == 1 and is_prepared(files[0]):
        load_rows(files[0], option)
        return files[0]
    progress = options.pop("progress", True)
    options.pop("option", None)
    renderer = Renderer(tokenizer, **options)
    _check_options(renderer.max_seq_len, renderer.min_supervised_tokens)
    key = hashlib.blake2b(digest_size=16)
    key.update(json.dumps([FORMAT_VERSION, _options(renderer)], sort_keys=True).encode())
    for file in files:
        key.update(_hash_content(file))
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in files[0].name.split(".")[0]) or "rows"
    folder = Path(cache_dir).expanduser() / f"{stem}-{key.hexdigest()}"
    if not is_prepared(folder):
        _prepare(files, renderer, folder, option, progress, replace=False)
    return folder


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything of a tokenizer that rows depend on: its class, vocabulary, rules and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # Set by every call with padding or truncation; no part of what the tokenizer is.
        rules.pop("truncation", None)
        rules.pop("padding", None)
    else:
        rules = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = [type(tokenizer).__name__, rules, special, tokenizer.chat_template]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _check_options(max_seq_len: int, min_supervised_tokens: int) -> None:
    if max_seq_len < 2:
        raise ValueError(f"max_seq_len is {max_seq_len}; it must be at least 2")
    if not 1 <= min_supervised_tokens <= max_seq_len:
        raise ValueError(f"min_supervised_tokens is {min_supervised_tokens}; it must lie in 1 .. max_seq_len")


def _check_mask_token(renderer: Renderer, report: PrepareReport, option: str) -> None:
    held = report.skipped.get(renderer.mask_token_reason, {"count": 0})["count"]
    if held > 1 and held > _MOST_WITH_MASK_TOKEN * (held + report.records):
        raise ValueError(
            f"mask_token_id={renderer.mask_token_id} is a token in use: {held} of {held + report.records} records of "
            f"{option} hold it; choose an id that the data never holds"
        )


def _options(renderer: Renderer) -> dict[str, Any]:
    return {
        "max_seq_len": renderer.max_seq_len,
        "min_supervised_tokens": renderer.min_supervised_tokens,
        "mask_token_id": renderer.mask_token_id,
        "vocab_size": renderer.vocab_size,
        "tokenizer": tokenizer_fingerprint(renderer.tokenizer),
    }


def _names(files: list[Path]) -> list[str]:
    """What stands for each file in the rows' sources: its name, with its folder's where names repeat."""
    counts = Counter(file.name for file in files)
    return [file.name if counts[file.name] == 1 else f"{file.parent.name}/{file.name}" for file in files]


def _hash_content(file: Path) -> bytes:
    """Hash of a file, or of a folder's files in the order of their names."""
    if file.is_dir():
        parts = [part.name.encode() + _hash_content(part) for part in sorted(file.iterdir()) if part.is_file()]
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest()


def _prepare_file(
    file: Path, name: str, option: str, renderer: Renderer, writer: RowWriter, report: PrepareReport, bar: tqdm[Any]
) -> None:
    columns: dict[str, None] = {}
    usable = False
    records = read_records(file, option, name)

    def finish(size: int, sources: list[str], plans: list[Plan], encoding: Future[Any]) -> None:
        for source, rows in zip(sources, renderer.finish(plans, encoding.result()), strict=True):
            if isinstance(rows, SkipRow):
                report.skip(str(rows), source)
            else:
                writer.add(rows, source)
                report.records += 1
        bar.update(size)
        bar.set_postfix_str(f"kept {report.records}, skipped {report.num_skipped}", refresh=False)

    # Tokenizing runs in the tokenizer's own threads; meanwhile this one reads and renders the next chunk.
    with ThreadPoolExecutor(1, "tokenize") as pool:
        pending: tuple[int, list[str], list[Plan], Future[Any]] | None = None
        while chunk := list(islice(records, _CHUNK)):
            sources, parsed = [], []
            for record in chunk:
                value = _parse(record, renderer.vocab_size)
                if isinstance(value, SkipRow):
                    report.skip(str(value), record.source)
                    if record.value is not None and len(columns) < 50:
                        columns.update(dict.fromkeys(record.value))
                    usable |= str(value) != NO_COLUMN and record.value is not None
                else:
                    usable = True
                    sources.append(record.source)
                    parsed.append(value)
            plans = renderer.plan(parsed)
            encoding = pool.submit(renderer.encode, plans)
            if pending:
                finish(*pending)
            pending = len(chunk), sources, plans, encoding
        if pending:
            finish(*pending)
    if not usable and columns:
        raise ValueError(
            f"{option}: {str(file)!r} has no usable column: found {', '.join(columns)}; expected {EXPECTED}"
        )
    report.files.append(name)
    report.rows = writer.rows


def _parse(record: Record, vocab_size: int) -> Any:
    if record.value is None:
        return SkipRow(record.fault)
    try:
        return parse_record(record.value, vocab_size)
    except SkipRow as skip:
        return skip


def _move(temporary: Path, out_dir: Path, replace: bool) -> None:
    """Put the finished folder in its place; a prepared folder that stands there makes way, or stays if not `replace`.

    In a cache the first one stays, for another process may be about to open it.
    """
    while True:
        try:
            temporary.replace(out_dir)
            return
        except OSError:
            # A folder that is not empty cannot be replaced in one step: it is moved aside first.
            if not is_prepared(out_dir):
                raise
            if not replace:
                return
            old = temporary.with_suffix(".old")
            with contextlib.suppress(FileNotFoundError):  # another process moved it first
                out_dir.replace(old)
            shutil.rmtree(old, ignore_errors=True)
