"""Conversations whose rendering is known but for their contents: one rendering instead of two for every answer.

Rendering is a fifth of a preparation's work when each turn is rendered as the engine saw it. Most templates put the
same text around the contents of all conversations with the same sequence of roles. A probe of that sequence tells the
text and whether every turn's history, generation prompt and ending stand unchanged in the whole; a conversation is
then compared, character by character, with what the probe foretells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .messages import Message, SkipRow

if TYPE_CHECKING:
    from .template import ChatTemplate

# Plain letters: no template trims them, no tokenizer matters, since probes are never tokenized.
SENTINEL = "dflashsentinel"
_CHECKED = 3  # conversations of a shape that are also rendered turn by turn before it is trusted
_MOST_SHAPES = 1000  # probed; a file with more has few conversations of each


class Shape:
    """The text between the contents of one sequence of roles: one more than there are messages."""

    def __init__(self, between: list[str], answers: list[int]) -> None:
        self.between = between
        self.answers = answers  # numbers of the assistant's messages
        self.checks_left = _CHECKED

    def starts(self, messages: Sequence[Message], text: str) -> list[int] | None:
        """Where each answer starts in `text`; None when that is not what the shape foretells."""
        pieces, starts, position = [self.between[0]], [], len(self.between[0])
        for number, message in enumerate(messages):
            content = message["content"]
            if number in self.answers:
                starts.append(position)
            pieces += (content, self.between[number + 1])
            position += len(content) + len(self.between[number + 1])
        return starts if position == len(text) and "".join(pieces) == text else None


class Shapes:
    """The shapes of one chat template, each probed when it is first met."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._known: dict[tuple[str, ...], Shape | None] = {}

    def find(self, messages: Sequence[Message]) -> Shape | None:
        """The shape of messages that hold text only; None when their turns must be rendered one by one."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                return None
            self._known[roles] = self._probe(roles)
        return self._known[roles]

    def distrust(self, messages: Sequence[Message]) -> None:
        """Render the turns of such messages one by one from now on."""
        self._known[tuple(message["role"] for message in messages)] = None

    def _probe(self, roles: tuple[str, ...]) -> Shape | None:
        template = self.template
        if template.has_tags or not template.stop or not template.prompts_header or roles[0] == "assistant":
            return None
        contents = [f"{SENTINEL}{number}e" for number in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        answers = [number for number, role in enumerate(roles) if role == "assistant"]
        try:
            whole = rest = template.text(messages)
            between = []
            for content in contents:
                if rest.count(content) != 1:
                    return None
                before, rest = rest.split(content)
                between.append(before)
            for number in answers:
                start = whole.index(contents[number])
                turn = whole[:start] + contents[number] + template.tail
                same = template.text(messages[:number], prompt=True) == whole[:start]
                if not same or not whole.startswith(turn) or template.text(messages[: number + 1]) != turn:
                    return None
        except SkipRow:
            return None  # a template that refuses such a sequence: each conversation gets its reason
        return Shape([*between, rest], answers)
