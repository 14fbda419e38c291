"""On-policy data: the target answers the prompts of a file itself, turn by turn, and nothing is asked twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .messages import Chat, Message, SkipRow, parse_record
from .readers import read_records


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
    """The conversations of `files`, each with an id that stays the same from run to run: "file:line"."""
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
            yield Conversation(str(given) if given is not None else record.source, turns)


def _turns(value: dict[str, Any]) -> list[Message]:
    """Turns to go through; a user turn at the end is a question too."""
    prompt = value.get("prompt")
    if isinstance(prompt, str) and not value.get("response") and not value.get("messages"):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": ""}]
    messages = value.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(messages, list) and isinstance(last, dict) and last.get("role") in ("user", "human"):
        value = {**value, "messages": [*messages, {"role": "assistant", "content": "-"}]}
    parsed = parse_record(value)
    if not isinstance(parsed, Chat):
        raise SkipRow("no conversation to answer")
    turns = []
    for turn in parsed.messages:
        if turn["role"] == "tool" or turn.get("tool_calls"):
            break  # what a tool says depends on how it was called
        turns.append(turn)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not any(turn["role"] == "user" for turn in turns):
        raise SkipRow("no user turn to answer")
    return turns


def finished_ids(out: Path) -> set[str]:
    """Ids in an output file; a line that a kill cut off at the end is taken away."""
    if not out.exists():
        return set()
    ids: set[str] = set()
    whole = 0
    with out.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if not line.endswith(b"\n"):
                break
            ids.add(row["id"])
            whole += len(line)
    with out.open("rb+") as file:
        file.truncate(whole)
    return ids


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
    done = finished_ids(out)
    waiting = iter(source)
    active: list[Conversation] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        while True:
            while len(active) < answerer.concurrency and (row := next(waiting, None)) is not None:
                if row.id in done:
                    summary.already += 1
                elif row.advance():
                    done.add(row.id)
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
                    line = {"id": row.id, "messages": row.done, "truncated": row.truncated}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
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
