"""On-policy data: the target answers the prompts of a file itself, turn by turn, and nothing is asked twice."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from .messages import Message, SkipRow, parse_prompt
from .readers import read_records

_LINE_STARTS = (b'{"key": ', b'{"id": ')  # of the lines of an output file


class Answer(NamedTuple):
    """One answer of the target; `truncated` when it was cut off before its end-of-turn token."""

    text: str
    truncated: bool


class Answerer(Protocol):
    """Answers several conversations, each given up to its last user turn."""

    concurrency: int  # conversations that are worth giving at once

    def answer(self, conversations: Sequence[list[Message]]) -> list[Answer | Exception]:
        """An answer, or what went wrong, for each conversation."""
        ...


@dataclass
class Conversation:
    """One row on its way: the source's turns, of which assistant turns are asked again."""

    id: str
    turns: list[Message]
    key: str
    done: list[Message] = field(default_factory=list)
    truncated: bool = False

    def advance(self) -> bool:
        """Take over turns up to the next question; False at the end."""
        while len(self.done) < len(self.turns):
            turn = self.turns[len(self.done)]
            if turn["role"] == "assistant":
                return True
            self.done.append(turn)
        return False

    def take(self, answer: Answer) -> None:
        self.done.append({"role": "assistant", "content": answer.text})
        if answer.truncated:
            # What would follow a cut-off answer is no conversation that the target would have.
            self.truncated = True
            self.turns = self.turns[: len(self.done)]


@dataclass
class Summary:
    """Counts of one regeneration."""

    written: int = 0
    already: int = 0
    truncated: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.written} rows written, {self.already} were there, {self.truncated} end in a cut-off answer"]
        for name, counts in (("skipped", self.skipped), ("failed", self.failed)):
            lines += [f"{count:>9}  {name}: {reason}" for reason, count in sorted(counts.items(), key=lambda c: -c[1])]
        return "\n".join(lines)


def conversations(files: Iterable[Path], summary: Summary, option: str = "--data") -> Iterator[Conversation]:
    """The conversations of `files`; an id is the record's own, else "file:line"."""
    for file in files:
        for record in read_records(file, option):
            try:
                if record.value is None:
                    raise SkipRow(record.fault)
                turns = _turns(record.value)
            except SkipRow as skipped:
                summary.skipped[str(skipped)] = summary.skipped.get(str(skipped), 0) + 1
                continue
            given = record.value.get("id")
            name = str(given) if given is not None else record.source
            yield Conversation(name, turns, _key(name, turns))


def _turns(value: dict[str, Any]) -> list[Message]:
    """Turns to go through; a user turn at the end is a question too."""
    messages = parse_prompt(value)
    if messages[-1]["role"] == "user":
        messages = [*messages, {"role": "assistant", "content": ""}]
    turns = []
    for turn in messages:
        if turn["role"] == "tool" or turn.get("tool_calls"):
            break  # what a tool says depends on how it was called
        turns.append(turn)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not any(turn["role"] == "user" for turn in turns):
        raise SkipRow("no user turn to answer")
    return turns


def _key(name: str, turns: list[Message]) -> str:
    """What tells rows apart: files in different folders, or a careless writer, may give two rows one id."""
    return hashlib.blake2b(json.dumps([name, turns]).encode(), digest_size=8).hexdigest()


def finished_keys(file: BinaryIO, option: str = "--out") -> set[str]:
    """Keys of the rows in an output file (ids, where they have no key); a line that a kill cut off is taken away.

    Raises ValueError, and changes nothing, where the file holds anything else.
    """
    keys: set[str] = set()
    whole, line = 0, b""
    for number, line in enumerate(file, 1):
        try:
            row = json.loads(line)
            if not isinstance(row["messages"], list):
                raise TypeError
            keys.add(row["key"] if "key" in row else row["id"])
        except (ValueError, TypeError, KeyError, RecursionError):
            ours = number > 1 or any(line.startswith(s) or s.startswith(line) for s in _LINE_STARTS)
            if ours and not line.endswith(b"\n"):
                line = b""
                break
            raise ValueError(
                f"{option}={file.name}: line {number} was not written by `dflash regenerate`; give another file"
            ) from None
        whole += len(line)
    file.truncate(whole)
    file.seek(0, os.SEEK_END)
    if line and not line.endswith(b"\n"):
        file.write(b"\n")
    return keys


@contextlib.contextmanager
def open_output(out: Path, option: str = "--out") -> Iterator[BinaryIO]:
    """The output file, read and written by this process alone. ValueError where another one writes it."""
    if out.is_dir():
        raise ValueError(f"{option}={out}: this is a folder; give a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("r+b" if out.exists() else "w+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{option}={out}: another process writes it right now") from None
        yield file


def regenerate(
    source: Iterable[Conversation],
    answerer: Answerer,
    out: Path,
    summary: Summary,
    *,
    drop_truncated: bool = False,
    progress: Any = None,
) -> Summary:
    """Answer every conversation and append it to `out` as it is done; rows that `out` holds are not asked again."""
    waiting = iter(source)
    active: list[Conversation] = []
    with open_output(out) as file:
        done = finished_keys(file)
        while True:
            while len(active) < answerer.concurrency and (row := next(waiting, None)) is not None:
                if row.key in done or row.id in done:
                    summary.already += 1
                elif row.advance():
                    done.add(row.key)
                    active.append(row)
            if not active:
                return summary
            answers = answerer.answer([row.done for row in active])
            still = []
            for row, answer in zip(active, answers, strict=True):
                if isinstance(answer, Exception):
                    summary.failed[str(answer)] = summary.failed.get(str(answer), 0) + 1
                    continue
                row.take(answer)
                if row.advance():
                    still.append(row)
                    continue
                summary.truncated += row.truncated
                if not (row.truncated and drop_truncated):
                    line = {"key": row.key, "id": row.id, "messages": row.done, "truncated": row.truncated}
                    file.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")
                    summary.written += 1
                if progress is not None:
                    progress.update()
            file.flush()
            active = still


def in_threads(ask: Any, conversations: Sequence[list[Message]], concurrency: int) -> list[Answer | Exception]:
    """`ask` for each conversation in threads; an exception stands in for its own answer alone."""

    def guarded(messages: list[Message]) -> Answer | Exception:
        try:
            return ask(messages)
        except Exception as error:
            return error

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(guarded, conversations))
