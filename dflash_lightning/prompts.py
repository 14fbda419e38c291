"""Prompts to decode: conversations up to their last user turn, with the group that they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.data.chunks import ARROW_SUFFIXES, suffix
from dflash_lightning.data.messages import SkipRow, parse_prompt
from dflash_lightning.data.readers import read_records


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer."""

    messages: list[dict[str, Any]]
    group: str = "all"

    @property
    def last(self) -> str:
        """The user's last words."""
        return str(self.messages[-1]["content"])


def read_prompts(files: str | Path | Sequence[str | Path]) -> list[Prompt]:
    """Prompts of files that hold conversations (all that `data.train` takes) or plain lines of text.

    An answer at the end of a conversation is left off. A prompt's group is its `group` or `category`; else the file's
    name where there are several files, else `all`. Raises ValueError, naming file and line, for what is no prompt.
    """
    paths = [Path(f) for f in ([files] if isinstance(files, (str, Path)) else files)]
    prompts = []
    for path in paths:
        found = list(_read(path, path.stem if len(paths) > 1 else "all"))
        if not found:
            raise ValueError(f"--prompts {path}: the file is empty")
        prompts += found
    return prompts


def _read(file: Path, group: str) -> Iterator[Prompt]:
    if suffix(file) in ARROW_SUFFIXES | {".parquet"} or file.suffix in {".gz", ".zst"} or file.is_dir():
        for record in read_records(file, "--prompts"):
            yield _prompt(record.value, f"--prompts {record.source}", group, record.fault)
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {file}: not UTF-8 text: {error}") from None
    whole = _json(text)  # an array of prompts, or one that is spread over lines
    if isinstance(whole, list | dict):
        for number, value in enumerate(whole if isinstance(whole, list) else [whole], start=1):
            yield _prompt(value, f"--prompts {file}, entry {number}", group)
        return
    # Not `splitlines`, which splits at separators that a JSON text may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            is_record = line.lstrip().startswith("{")
            value = _json(line) if is_record else line.strip()
            yield _prompt(value, f"--prompts {file}, line {number}", group, "not JSON")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _prompt(value: Any, where: str, group: str, fault: str = "not an object or a text") -> Prompt:
    value = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {fault}")
    try:
        messages = parse_prompt(value)
    except SkipRow as skipped:
        raise ValueError(f"{where}: {skipped}; give `messages` (role, content) or `prompt`") from None
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{where}: no user turn")
    return Prompt(messages, str(value.get("group") or value.get("category") or group))
