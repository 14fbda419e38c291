"""Which characters of a rendered conversation the target itself would have written.

An answer begins where the generation prompt ends and runs to its end-of-turn token, that one included. The engine
sees each turn as `render(messages before it) + generation prompt`; whatever lies between that and the answer (a
header, an empty thinking block) comes from the template and is not supervised.

Policies, where templates differ:

- The template rewrites earlier turns (drops their reasoning): the turn gets its own text, as the engine saw it.
- The rendered turn begins with an empty thinking block that the message does not hold: not supervised. It is what the
  engine puts into the prompt when thinking is off.
- The generation prompt holds an empty thinking block that the rendered turn lacks: the turn's text is the generation
  prompt and the answer, as the engine saw it.
- The generation prompt opens a thinking block and the rendered turn drops the reasoning: the text is the generation
  prompt, the reasoning, the closing tag, a blank line and the answer. Without reasoning the rendered turn stands.
- The template knows no generation prompt: its header before the answer is not supervised.
- The end-of-turn token stands at the start of the next message: that token is supervised, and when no message follows
  it is put behind the text, so that last and middle turns learn the same. Only then do the ids differ (by that one
  token) from the template's.
- The template renders nothing of the turn (tool calls that it does not know): not supervised.
- An assistant turn without any message before it is not supervised: an engine never generates without a prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .messages import Message, SkipRow
from .shapes import SENTINEL, Shape
from .template import ChatTemplate, common_length, text_only

# Opening and closing marks of the known thinking models: <think>, <thinking>, <seed:think>, [THINK], <|channel>thought
_OPEN = r"(?:<\|?[\w:]*think[\w:]*\|?>|\[THINK\]|<\|channel>thought)"
_CLOSE = r"(?:<\|?/[\w:]*think[\w:]*\|?>|\[/THINK\]|<channel\|>)"
_EMPTY_BLOCK = re.compile(rf"\s*{_OPEN}?\s*{_CLOSE}\n{{0,2}}", re.IGNORECASE)
_OPENER = re.compile(rf"({_OPEN})(\s*)$", re.IGNORECASE)
_CLOSER = re.compile(_CLOSE, re.IGNORECASE)
_OPENED = re.compile(rf"\s*{_OPEN}", re.IGNORECASE)
_REASONED = re.compile(rf"^\s*(?:{_OPEN})?\s*(\S.*?)\s*{_CLOSE}\s*(.*)$", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a text; `stop` is where its end-of-turn token begins, or `end` without one."""

    start: int
    stop: int
    end: int


@dataclass
class SupervisedText:
    """A text to tokenize and the spans of it that the target wrote, in order."""

    text: str
    num_messages: int  # of the conversation, from its start
    spans: list[Span] = field(default_factory=list)


def supervised_texts(
    template: ChatTemplate, messages: list[Message], tools: Any = None, notes: Counter[str] | None = None
) -> list[SupervisedText]:
    """The conversation as texts with supervised spans: one, or several when the template rewrites earlier turns.

    A turn whose beginning cannot be told is left unsupervised and counted in `notes`. Raises SkipRow when the template
    refuses the conversation or nothing is supervised.
    """
    if not any(message["role"] == "assistant" and has_output(message) for message in messages):
        raise SkipRow("no assistant text")
    full = template.text(messages, tools)
    shape = template.shapes.find(messages) if not tools and text_only(messages) else None
    known = _as_shaped(template, messages, full, shape) if shape else None
    if known is None:
        return _turn_by_turn(template, messages, tools, full, notes)
    assert shape is not None
    if shape.checks_left > 0:
        shape.checks_left -= 1
        slowly = _turn_by_turn(template, messages, tools, full, notes)
        if slowly != [known]:
            template.shapes.distrust(messages)
        return slowly
    return [known]


def _as_shaped(template: ChatTemplate, messages: list[Message], full: str, shape: Shape) -> SupervisedText | None:
    """The conversation as its shape foretells it; None for one that is not like that."""
    answers = [messages[number]["content"] for number in shape.answers]
    starts = shape.starts(messages, full)
    if starts is None or any(not answer.strip() or _CLOSER.search(answer) for answer in answers):
        return None
    stops = [
        start + len(answer) + template.tail.find(template.stop) for start, answer in zip(starts, answers, strict=True)
    ]
    spans = [Span(start, stop, stop + len(template.stop)) for start, stop in zip(starts, stops, strict=True)]
    return SupervisedText(full, len(messages), spans)


def _turn_by_turn(
    template: ChatTemplate, messages: list[Message], tools: Any, full: str, notes: Counter[str] | None
) -> list[SupervisedText]:
    """Each turn as the engine saw it."""
    texts = [SupervisedText(full, len(messages))]
    faults: list[str] = []
    # From the last turn back: a later turn's text often holds the earlier turns unchanged and serves them, too.
    for index in reversed(range(len(messages))):
        if messages[index]["role"] != "assistant":
            continue
        try:
            text, spans = _turn(template, messages[: index + 1], tools, full if index == len(messages) - 1 else None)
        except SkipRow as skip:
            faults.append(str(skip))
            continue
        if has_output(messages[index]) and not any(text[span.start : span.stop].strip() for span in spans):
            # An end-of-turn token alone would teach the drafter to end at once where the target calls a tool.
            faults.append("the chat template renders nothing of an assistant's turn (of its tool calls, say)")
            continue
        written = text[: spans[-1].end]
        home = next((known for known in texts if known.text.startswith(written)), None)
        if home is None:
            home = SupervisedText(text, index + 1)
            texts.append(home)
        home.spans = spans + home.spans
    texts = [text for text in reversed(texts) if text.spans]
    if not texts:
        raise SkipRow(faults[-1])
    if notes is not None:
        notes.update(faults)
    for text in texts:
        _borrow_stops(template, text, messages, tools)
    return texts


def has_output(message: Message) -> bool:
    """Whether an assistant message holds anything that a model wrote."""
    return bool(message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls"))


def _turn(template: ChatTemplate, messages: list[Message], tools: Any, text: str | None) -> tuple[str, list[Span]]:
    """The text up to the last of `messages`, an assistant turn, and that turn's spans."""
    history, message = messages[:-1], messages[-1]
    prompt = template.text(history, tools, prompt=True)
    text = template.text(messages, tools) if text is None else text
    text, start = _start(template, history, message, tools, prompt, text)
    stop, end = _end(template, text, start)
    if not template.has_tags:
        return text, [Span(start, stop, end)]
    # The author's tags decide inside the turn; its start and its end-of-turn token stay as found above.
    tagged = [(max(a, start), min(b, end)) for a, b in template.tagged(messages, tools) if b > start and a < end]
    if not tagged:
        raise SkipRow("the chat template's generation tags leave out the assistant's turn")
    spans = [Span(a, min(b, stop), min(b, stop)) for a, b in tagged]
    if not text[tagged[-1][1] : stop].strip():
        spans[-1] = Span(spans[-1].start, stop, end)
    return text, spans


def _start(
    template: ChatTemplate, history: list[Message], message: Message, tools: Any, prompt: str, text: str
) -> tuple[str, int]:
    """Where the target began to write, and the turn's text (another one where policy says so)."""
    reasoning = _reasoning(message)
    if text.startswith(prompt):
        start = len(prompt)
        if not template.prompts_header and template.header.strip() and text.startswith(template.header, start):
            start += len(template.header)
        if reasoning:
            kept = reasoning in text[start:]
            return (text, start) if kept else _with_reasoning(template, history, tools, prompt, reasoning, text, start)
        block = _EMPTY_BLOCK.match(text, start)
        if block is None:
            return text, start
        # The template's own switch tells exactly where its empty block ends; else its usual form does.
        switched = [p for p in template.prompts(history, tools, thinking=False) if text.startswith(p)]
        longest = max(map(len, switched), default=0)
        return text, longest if longest > start else block.end()
    switched = [p for p in template.prompts(history, tools, thinking=bool(reasoning)) if text.startswith(p)]
    if switched:
        return text, max(map(len, switched))
    probe = template.text([*history, {"role": "assistant", "content": SENTINEL}], tools)
    start = probe.rfind(SENTINEL)
    if start < 0 or not text.startswith(probe[:start]):
        raise SkipRow("cannot tell where an assistant turn begins in the chat template's rendering")
    if _EMPTY_BLOCK.fullmatch(prompt, common_length(prompt, text)):
        return prompt + text[start:], len(prompt)
    if not reasoning:
        return text, start
    if reasoning not in text[start:]:
        return _with_reasoning(template, history, tools, prompt, reasoning, text, start)
    if _OPENER.search(prompt) and not _OPENED.match(text, start):
        return prompt + text[start:], len(prompt)  # a raw completion: its opening tag stands in the prompt
    return text, start


def _reasoning(message: Message) -> str:
    reasoning = message.get("reasoning_content", "").strip()
    if reasoning or not _CLOSER.search(message["content"]):  # the cheap look first: this runs on every turn
        return reasoning
    match = _REASONED.match(message["content"])
    return match.group(1) if match else ""


def _with_reasoning(
    template: ChatTemplate, history: list[Message], tools: Any, prompt: str, reasoning: str, text: str, start: int
) -> tuple[str, int]:
    """The turn with the reasoning that the template drops, behind the generation prompt that asks for it."""
    for begun in [prompt, *template.prompts(history, tools, thinking=True)]:
        opener = _OPENER.search(begun)
        if opener:
            tag, space = opener.groups()
            closer = {"[think]": "[/THINK]", "<|channel>thought": "<channel|>"}.get(tag.lower())
            closer = closer or re.sub(r"^<(\|?)", r"<\1/", tag)
            blank = "\n" if "\n" in space else ""
            answer = text[start:].lstrip("\n")
            return f"{begun}{reasoning}{blank}{closer}{blank * 2}{answer}", len(begun)
    return text, start  # a target that does not reason: its template knows no such block, and the answer stands alone


def _end(template: ChatTemplate, text: str, start: int) -> tuple[int, int]:
    """Where the turn's end-of-turn token begins and ends; both the end of the answer without one."""
    if template.tail and text.endswith(template.tail) and len(text) - len(template.tail) >= start:
        stop = len(text) - len(template.tail)
        if template.stop:
            stop += template.tail.find(template.stop)
        return stop, stop + len(template.stop)
    if template.stop:
        # Another end than the plain turn's: after a tool call, or on the conversation's last turn.
        end = len(text.rstrip())
        for token in template.stops:
            if end - len(token) >= start and text.endswith(token, start, end):
                return end - len(token), end
    return len(text), len(text)


def _borrow_stops(template: ChatTemplate, text: SupervisedText, messages: list[Message], tools: Any) -> None:
    """Supervise end-of-turn tokens that the template writes at the start of the next message."""
    if template.stop:
        return
    for number, span in enumerate(text.spans):
        if span.end == len(text.text):
            text.text += template.next_stop(messages[: text.num_messages], tools)
        token = template.stop_at(text.text, span.end)
        if token:
            text.spans[number] = Span(span.start, span.end, span.end + len(token))
