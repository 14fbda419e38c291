"""Prompts to decode: conversations up to their last user turn, with the group that they belong to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Prompts of JSONL (`messages` or `prompt`, perhaps `group`) or plain lines of text.

    A prompt's group is its `group` or `category`; else the file's name where there are several files, else `all`.
    """
    paths = [Path(f) for f in ([files] if isinstance(files, (str, Path)) else files)]
    prompts = []
    for path in paths:
        found = _read(path, path.stem if len(paths) > 1 else "all")
        if not found:
            raise ValueError(f"--prompts {path}: the file is empty")
        prompts += found
    return prompts


def _read(file: Path, group: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(Prompt([{"role": "user", "content": line.strip()}], group))
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--prompts {file}, line {number}: not JSON: {error}") from None
        messages = record.get("messages") or record.get("conversations")
        if messages is None and isinstance(record.get("prompt"), str):
            messages = [{"role": "user", "content": record["prompt"]}]
        if not messages or not all(isinstance(m, dict) and "role" in m and "content" in m for m in messages):
            raise ValueError(f"--prompts {file}, line {number}: needs `messages` (role, content) or `prompt`")
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError(f"--prompts {file}, line {number}: no user turn")
        prompts.append(Prompt(messages, str(record.get("group") or record.get("category") or group)))
    return prompts
