"""One record of a data file as what it means: a conversation, plain text, or ready token ids.

Whatever a record holds, the result is one of those or `SkipRow` with a reason: never another exception.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

Message = dict[str, Any]

EXPECTED = "messages, conversations, prompt + response, text, or input_ids + loss_mask"
NO_COLUMN = "no usable column"

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
_TEXT_PARTS = ("text", "input_text", "output_text")


class SkipRow(Exception):  # noqa: N818  (not an error: the row is counted and left out)
    """The row cannot be used; the message is the reason shown to the user."""


@dataclass(frozen=True)
class Chat:
    """A conversation, ready for a chat template: `content` is text in every message."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class PlainText:
    """Text without turns; every token of it is supervised."""

    text: str


@dataclass(frozen=True)
class ReadyRow:
    """Token ids and loss mask as the file gave them, checked."""

    input_ids: list[int]
    loss_mask: list[int]
    group: int | None = None  # of a row from a prepared folder; see identity.py


def parse_record(record: Mapping[str, Any], vocab_size: int | None = None) -> Chat | PlainText | ReadyRow:
    """What a record holds; of several usable columns the first in the order of `EXPECTED` counts, ready ids before all.

    An empty column (null, "" or []) counts as absent. Raises SkipRow.
    """
    present = _present(record)
    if {"input_ids", "loss_mask"} <= present:
        return _ready(record["input_ids"], record["loss_mask"], record.get("group"), vocab_size)
    messages = _conversation(record, present)
    if messages:
        return Chat(messages, _tools(record.get("tools")))
    if "text" in present:
        if not isinstance(record["text"], str):
            _skip(f"text is {_kind(record['text'])}, not a string")
        return PlainText(record["text"])
    for column in ("messages", "conversations", "conversation", "text"):
        if column in record:
            _skip(f"{column} is empty")
    _skip(NO_COLUMN)


def parse_prompt(record: Mapping[str, Any]) -> list[Message]:
    """The turns of a conversation that may wait for an answer: one of `parse_record`, or a `prompt` alone.

    Raises SkipRow.
    """
    messages = _conversation(record, _present(record), prompt_alone=True)
    if not messages:
        _skip("no conversation to answer")
    try:
        json.dumps(messages, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        _skip("the text is not valid Unicode (a lone surrogate)")
    return messages


def normalize_messages(messages: Any) -> list[Message]:
    """A list of messages in any of the accepted spellings, in ours. Raises SkipRow."""
    return _messages(messages, "messages")


def _present(record: Mapping[str, Any]) -> set[str]:
    for column in _MEDIA_COLUMNS:
        if record.get(column):
            _skip(f"has {column}; only text conversations can be used")
    return {key for key, value in record.items() if value is not None and value != "" and value != []}


def _conversation(record: Mapping[str, Any], present: set[str], prompt_alone: bool = False) -> list[Message]:
    """The record's turns, [] where it has none."""
    messages: list[Message] = []
    column = next((c for c in ("messages", "conversations", "conversation") if c in present), None)
    answer = next((c for c in ("response", "completion") if c in present), None)
    if column:
        messages = _messages(record[column], column)
    elif "prompt" in present and (answer or prompt_alone):
        messages = _side(record["prompt"], "prompt", "user")
        messages += _side(record[answer], answer, "assistant") if answer else []
    system = record.get("system")
    if messages and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _skip(reason: str) -> NoReturn:
    raise SkipRow(reason)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _ready(ids: Any, mask: Any, group: Any, vocab_size: int | None) -> ReadyRow:
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        # bool is an int to Python; a mask may be written with it, ids may not.
        allowed = (int, bool) if name == "loss_mask" else (int,)
        if not isinstance(values, list) or not all(type(value) in allowed for value in values):
            _skip(f"{name} is not a list of integers")
    if len(ids) != len(mask):
        _skip("input_ids and loss_mask differ in length")
    if any(value not in (0, 1) for value in mask):
        _skip("loss_mask holds something else than 0 and 1")
    limit = 2**31 if vocab_size is None else vocab_size
    if min(ids) < 0 or max(ids) >= limit:
        _skip(f"a token id is outside the vocabulary of {limit}")
    known = type(group) is int and 0 <= group < 2**64  # else a column of the user's own
    return ReadyRow(ids, [int(value) for value in mask], group if known else None)


def _side(value: Any, column: str, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, column)


def _messages(value: Any, column: str) -> list[Message]:
    if isinstance(value, str):
        value = _from_json(value, column)
    if not isinstance(value, list) or not value:
        _skip(f"{column} is {_kind(value)}, not a list of messages")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        _skip(f"a message is {_kind(message)}, not an object")
    role = message.get("role") if message.get("role") is not None else message.get("from")
    if not isinstance(role, str):
        _skip(f"a message's role is {_kind(role)}, not a string")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    calls = message.get("tool_calls")
    if role == "function_call":  # ShareGPT: the call as JSON text
        role, calls, content = "assistant", _from_json(content, "function_call"), None
        calls = calls if isinstance(calls, list) else [calls]
    if role not in _ROLES:
        _skip(f"unknown role {role[:40]!r}; known: system, developer, user, assistant, tool")
    result: Message = {"role": _ROLES[role], "content": "" if content is None else _text(content)}
    if result["role"] == "assistant":
        if calls not in (None, []):
            result["tool_calls"] = _tool_calls(calls)
        reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
        if reasoning is not None:
            result["reasoning_content"] = _text(reasoning)
        if content is None and not result.get("tool_calls") and not result.get("reasoning_content"):
            _skip("an assistant message has no content")
    elif content is None:
        _skip(f"a {result['role']} message has no content")
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    return result


def _text(content: Any) -> str:
    """Text of a message; the parts of a list are put together without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _skip(f"a message's content is {_kind(content)}, not text")
    texts: list[str] = []
    for part in content:
        if isinstance(part, Mapping):
            kind = part.get("type") or "text"
            if kind not in _TEXT_PARTS:
                _skip(f"a message holds a part of type {str(kind)[:40]!r}; only text can be used")
            part = part.get("text")
        if not isinstance(part, str):
            _skip(f"a text part is {_kind(part)}, not a string")
        texts.append(part)
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _from_json(calls, "tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _skip(f"tool_calls is {_kind(calls)}, not a list")
    result = []
    for call in calls:
        if not isinstance(call, Mapping):
            _skip(f"a tool call is {_kind(call)}, not an object")
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            _skip("a tool call has no function name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # Serving engines hand templates the parsed object. Text that is no object goes through as it is.
            try:
                parsed = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                parsed = arguments
            arguments = parsed if isinstance(parsed, dict) else arguments
        elif arguments is None:
            arguments = {}
        elif not isinstance(arguments, Mapping):
            _skip(f"a tool call's arguments are {_kind(arguments)}, not text or an object")
        entry: dict[str, Any] = {
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        result.append(entry)
    return result


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        tools = _from_json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _skip("tools is not a list of JSON schemas")
    return tools


def _from_json(text: Any, column: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        _skip(f"{column} is text that is not JSON")
