"""Conversations to a prepared folder: read, render, tokenize, write, report.

One pass in flat memory; in parallel; a stopped run goes on where it was; the folder appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .chunks import Chunk, file_size, read_chunks
from .messages import EXPECTED
from .parts import PartWriter, Progress, lock
from .pool import UnfitError, WorkerPool, usable_cores
from .render import Renderer
from .report import PrepareReport
from .rows import MOST_ROWS_WITH_MASK_TOKEN, VERSIONS, is_prepared, load_rows, read_report
from .weights import Source, resolve_sources
from .work import ChunkRows, chunk_rows

_BYTES_A_WORKER = 4 << 20  # of input: starting a worker takes seconds, which less work than this is not worth
_MOST_COLUMNS = 50

# Given the folder before it gets its name, its report, and tokens and supervised tokens of each row; returns entries of
# the report.
Finish = Callable[[Path, PrepareReport, np.ndarray, np.ndarray], dict[str, Any]]


def prepare_rows(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    *,
    max_seq_len: int,
    min_supervised_tokens: int = 2,
    mask_token_id: int | None = None,
    vocab_size: int | None = None,
    weights: Sequence[float] | None = None,
    workers: int | None = None,
    option: str = "data.train",
    progress: bool = True,
    finish: Finish | None = None,
) -> PrepareReport:
    """Render and tokenize every record of the files into the prepared folder `out_dir`.

    `vocab_size` is the target's (default: the tokenizer's). `weights`: see `resolve_sources`. `workers`: processes
    (default: the usable cores; 1 works in this process). The rows do not depend on the number of workers. The folder
    appears whole or not at all; a prepared folder that stands there is replaced; a stopped call with the same arguments
    goes on where it was. Raises FileNotFoundError or ValueError, naming files and `option`, when a file is missing,
    empty or unreadable, has no usable column, or no row of all files can be used; ChildProcessError when a worker died.
    """
    _check_options(max_seq_len, min_supervised_tokens, workers)
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
    sources = resolve_sources(paths, weights, option)
    with lock(out_dir, False, option):
        return _Preparation(sources, renderer, out_dir, option, progress, workers, finish).run()


def ensure_rows(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: str | Path,
    *,
    weights: Sequence[float] | None = None,
    workers: int | None = None,
    option: str = "data.train",
    progress: bool = True,
    **options: Any,
) -> Path:
    """The prepared folder for `paths`: a prepared folder as it is, else files prepared once into `cache_dir`.

    The cache's key is the files' content and weights, the chat template, the tokenizer and the options (those of
    `prepare_rows`), so that a changed file or template is prepared anew. Safe when several processes call it at once:
    one prepares, the others wait for it.
    """
    sources = resolve_sources(paths, weights, option)
    if len(sources) == 1 and sources[0].weight == 1 and is_prepared(sources[0].file):
        folder = sources[0].file
        load_rows(folder, option)
    else:
        renderer = Renderer(tokenizer, **options)
        _check_options(renderer.max_seq_len, renderer.min_supervised_tokens, workers)
        key = hashlib.blake2b(digest_size=16)
        key.update(json.dumps([VERSIONS, _options(renderer), [s.weight for s in sources]]).encode())
        for source in sources:
            key.update(_hash_content(source.file))
        first = sources[0].file.name.split(".")[0]
        stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in first) or "rows"
        folder = Path(cache_dir).expanduser() / f"{stem}-{key.hexdigest()}"
        if not is_prepared(folder):
            with lock(folder, True, option):
                if not is_prepared(folder):  # another process may have made it meanwhile
                    report = _Preparation(sources, renderer, folder, option, progress, workers).run()
                    if progress and report.num_skipped:
                        print(report)
                    return folder
    for warning in read_report(folder).get("warnings", []):
        warnings.warn(f"{option}: {warning}", stacklevel=2)
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


class _Preparation:
    """One call, under the output's lock."""

    def __init__(
        self,
        sources: list[Source],
        renderer: Renderer,
        out_dir: Path,
        option: str,
        progress: bool,
        workers: int | None,
        finish: Finish | None = None,
    ) -> None:
        self.sources = sources
        self.names = _names([source.file for source in sources])
        self.renderer = renderer
        self.out_dir = out_dir
        self.option = option
        self.show_progress = progress
        self.workers = usable_cores() if workers is None else workers
        self.before_name = finish
        self.stats = [_stat(source.file) for source in sources]
        self.sizes = [file_size(source.file) for source in sources]

    def run(self) -> PrepareReport:
        inputs = [
            [name, str(source.file.resolve()), source.weight, stat]
            for name, source, stat in zip(self.names, self.sources, self.stats, strict=True)
        ]
        key = json.dumps([VERSIONS, _options(self.renderer), inputs])
        writer = PartWriter(self.out_dir, hashlib.blake2b(key.encode(), digest_size=16).hexdigest())
        try:
            self._make_rows(writer)
            report = self._finish(writer)
        except ValueError:
            writer.discard()  # wrong input: the same would happen again
            raise
        except BaseException:
            writer.close()
            if not writer.parts:
                writer.discard()
            raise
        for warning in report.warnings:
            warnings.warn(f"{self.option}: {warning}", stacklevel=3)
        return report

    def _make_rows(self, writer: PartWriter) -> None:
        progress = writer.progress
        before = sum(self.sizes[: progress.file])
        with tqdm(
            desc="prepare", total=sum(self.sizes), initial=before, unit="B", unit_scale=True, leave=False,
            disable=not self.show_progress,
        ) as bar:  # fmt: skip
            for (number, chunk), rows in self._rows(progress.file, progress.record):
                self._enter_file(progress, number)
                progress.record = rows.last
                progress.counts.add(rows.counts)
                entry = progress.files[-1]
                entry["records"] += rows.counts.records
                entry["rows"] += rows.counts.rows
                entry["left_out"] += rows.counts.left_out
                entry["skipped"] += rows.counts.num_skipped
                progress.usable |= rows.usable
                progress.columns = list(dict.fromkeys(progress.columns + rows.columns))[:_MOST_COLUMNS]
                writer.add(rows)
                bar.update(sum(self.sizes[:number]) + chunk - bar.n)
                bar.set_postfix_str(f"{progress.rows:,} rows, {progress.counts.num_skipped:,} skipped", refresh=False)
        self._enter_file(progress, len(self.sources))
        writer.end_part()

    def _enter_file(self, progress: Progress, number: int) -> None:
        """Files up to `number` are done: check each, and begin the next one's counts."""
        while len(progress.files) <= number:
            if progress.files:
                self._check_file(progress)
            if len(progress.files) == len(self.sources):
                return
            progress.file, progress.record = len(progress.files), 0
            progress.columns, progress.usable = [], False
            name, weight = self.names[progress.file], self.sources[progress.file].weight
            progress.files.append(
                {"name": name, "weight": weight, "records": 0, "rows": 0, "left_out": 0, "skipped": 0}
            )

    def _check_file(self, progress: Progress) -> None:
        file = self.sources[progress.file].file
        if not progress.usable and progress.columns:
            found = ", ".join(progress.columns)
            raise ValueError(f"{self.option}: {str(file)!r} has no usable column: found {found}; expected {EXPECTED}")
        if _stat(file) != self.stats[progress.file]:
            raise ValueError(f"{self.option}: {str(file)!r} changed while it was read; run again when it is complete")

    def _rows(self, file: int, record: int) -> Iterator[tuple[tuple[int, int], ChunkRows]]:
        """Rows chunk by chunk from behind `record` of `file`, each with its file's number and how far that was read."""

        def jobs() -> Iterator[tuple[tuple[int, int], tuple[Chunk, str, float]]]:
            for number in range(file, len(self.sources)):
                source = self.sources[number]
                for chunk in read_chunks(source.file, self.option, skip=record if number == file else 0):
                    yield (number, chunk.position), (chunk, self.names[number], source.weight)

        waiting = jobs()
        workers = min(self.workers, sum(self.sizes[file:]) // _BYTES_A_WORKER)
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(WorkerPool(workers)) if workers > 1 else None
            for tag, job in waiting:
                yield tag, chunk_rows(*job, self.renderer)
                # The first chunk is made here while the workers start; it also tells whether the tokenizer's fast path
                # can be trusted, which must be the same in all of them.
                if pool and self._configure(pool):
                    yield from pool.rows(waiting)
                pool = None

    def _configure(self, pool: WorkerPool) -> bool:
        try:
            pool.configure(self.renderer)
        except UnfitError as error:
            warnings.warn(f"{self.option}: prepared in one process, since {error}", stacklevel=2)
            return False
        return True

    def _finish(self, writer: PartWriter) -> PrepareReport:
        counts = writer.progress.counts
        report = PrepareReport(path=str(self.out_dir), options=_options(self.renderer), files=writer.progress.files)
        report.add(counts)
        self._check_mask_token(report)
        if report.rows == 0:
            files = ", ".join(repr(str(source.file)) for source in self.sources)
            raise ValueError(f"{self.option}: no row of {files} can be used:\n{report}")
        report.warnings = [text for text in [self._wrong_template(report)] if text]
        lengths, supervised, largest, content_hash = writer.measure()
        report.finish(lengths, supervised, largest, content_hash)
        if self.before_name:
            report.extra = self.before_name(writer.rows, report, lengths, supervised)
        writer.finish(report)
        writer.take_place()
        return report

    def _check_mask_token(self, report: PrepareReport) -> None:
        held = report.skipped.get(self.renderer.mask_token_reason, {"count": 0})["count"]
        if held > 1 and held > MOST_ROWS_WITH_MASK_TOKEN * (held + report.records):
            raise ValueError(
                f"mask_token_id={self.renderer.mask_token_id} is a token in use: {held} of {held + report.records} "
                f"records of {self.option} hold it; choose an id that the data never holds"
            )

    def _wrong_template(self, report: PrepareReport) -> str:
        """A warning when most answers end in no special token: the usual sign of another family's chat template."""
        if report.answers_ended * 2 >= report.answers:
            return ""
        stop = self.renderer.template().stop
        tokens = self.renderer.tokenizer.tokenize(stop) if stop else []
        pieces = f"its end-of-turn text {stop!r} is the tokens {tokens}" if stop else "it has no end-of-turn text"
        return (
            f"the answers of {report.answers - report.answers_ended} of {report.answers} rows end in no special token "
            f"of the tokenizer, so that a served target would not stop there. Does the chat template belong to another "
            f"model? {pieces}. An answer ends in {report.unended[-80:]!r}"
        )


def _check_options(max_seq_len: int, min_supervised_tokens: int, workers: int | None) -> None:
    if max_seq_len < 2:
        raise ValueError(f"max_seq_len is {max_seq_len}; it must be at least 2")
    if not 1 <= min_supervised_tokens <= max_seq_len:
        raise ValueError(f"min_supervised_tokens is {min_supervised_tokens}; it must lie in 1 .. max_seq_len")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")


def _options(renderer: Renderer) -> dict[str, Any]:
    return renderer.arguments() | {"tokenizer": tokenizer_fingerprint(renderer.tokenizer)}


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


def _stat(file: Path) -> list[Any]:
    """What tells a changed file without reading it."""
    if file.is_dir():
        return [[part.name, *_stat(part)] for part in sorted(file.iterdir()) if part.is_file()]
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]
