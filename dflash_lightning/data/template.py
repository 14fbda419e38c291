"""The target's own chat template: rendering it, and what a plain turn looks like in it.

A template is probed once with the smallest conversation. The probe tells the header it puts before an answer, the
text it puts behind one, and which of that text is the end-of-turn token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from .messages import Message, SkipRow
from .shapes import SENTINEL, Shapes

_TAGS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Names under which templates take the switch between thinking and not thinking.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_CHECKED = 16  # renderings compared with the tokenizer's own before the fast way is trusted


class ChatTemplate:
    """A tokenizer's chat template.

    `header`: text between history and answer. `tail`: text behind an answer. `stop`: the end-of-turn token's text in
    `tail`, "" when the template puts none there (GLM: the next message's first token ends the turn).
    `prompts_header`: False when the template knows no generation prompt and writes the header with the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None) -> None:
        self.tokenizer = tokenizer
        self.source = template_source(tokenizer, tools)
        self.has_tags = _TAGS.search(self.source) is not None
        self.switches = tuple(name for name in _THINKING_SWITCHES if re.search(rf"\b{name}\b", self.source))
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        self.added_tokens = {token for token in added if token.strip()}
        bos, eos = (tokenizer.special_tokens_map.get(name) for name in ("bos_token", "eos_token"))
        stops = {token for token, special in added.items() if special and token.strip()} | ({eos} if eos else set())
        # BOS opens a conversation; some tokenizers name their end-of-turn token so, too.
        self.stops = tuple(sorted((s for s in stops if s != bos or s == eos), key=len, reverse=True))
        self.header, self.tail, self.stop, self.prompts_header = "", "", "", True
        # The tokenizer's own call costs thrice the rendering itself, which is a sixth of the whole preparation.
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        self._compiled = compile_template(self.source) if compile_template else None
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._checks_left = _CHECKED
        self.shapes = Shapes(self)
        self._probe(tools)

    def _probe(self, tools: list[dict[str, Any]] | None) -> None:
        history = [{"role": "user", "content": "a"}]
        try:
            turn = self.text([*history, {"role": "assistant", "content": SENTINEL}], tools)
            before = self.text(history, tools)
            prompt = self.text(history, tools, prompt=True)
        except SkipRow:
            return  # a template that refuses even this; rows will tell why
        start = turn.rfind(SENTINEL)
        if start < 0:
            return
        self.header = turn[common_length(before, turn[:start]) : start]
        self.tail = turn[start + len(SENTINEL) :]
        self.prompts_header = prompt != before
        found = re.search("|".join(map(re.escape, sorted(self.added_tokens, key=len, reverse=True))) or "$^", self.tail)
        self.stop = found.group() if found else self.tail.strip()

    def text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False, **switches: Any) -> str:
        """The rendered conversation; with `prompt`, the generation prompt behind it. Raises SkipRow."""
        if not messages:
            raise SkipRow("there is no message before the assistant's first turn")
        try:
            text = self._render(messages, tools, prompt, switches)
        except TypeError as error:
            # Some templates want a call's arguments as text, others as an object; the record's form does not matter.
            try:
                text = self._render([_arguments_as_text(m) for m in messages], tools, prompt, switches)
            except Exception:
                raise SkipRow(_reason(error)) from error
        except Exception as error:
            # A template is a program of the target's author, run on a user's data: whatever it raises concerns the row.
            raise SkipRow(_reason(error)) from error
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise SkipRow("the text is not valid Unicode (a lone surrogate)") from None
        return text

    def _render(self, messages: Sequence[Message], tools: Any, prompt: bool, switches: dict[str, Any]) -> str:
        fast = None
        if self._compiled and not tools and not switches and text_only(messages):
            fast = self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self._special_tokens
            )
            if self._checks_left <= 0:
                return fast
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **switches
        )
        assert isinstance(text, str)
        if fast is not None:
            self._checks_left -= 1
            if fast != text:
                self._compiled = None  # a tokenizer class with its own ways
        return text

    def tagged(self, messages: Sequence[Message], tools: Any = None) -> list[tuple[int, int]]:
        """Characters of `text(messages)` inside the template's generation tags."""
        try:
            render: Any = render_jinja_template  # its annotations leave out the variables of templates
            _, spans = render(
                [list(messages)],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise SkipRow(_reason(error)) from error
        return [(start, end) for start, end in spans[0] if end > start]

    def prompts(self, history: Sequence[Message], tools: Any, thinking: bool) -> list[str]:
        """The history with its generation prompt under each switch that the template knows, set to `thinking`."""
        texts = []
        for switch in self.switches:
            try:
                texts.append(self.text(history, tools, prompt=True, **{switch: thinking}))
            except SkipRow:
                continue
        return texts

    def next_stop(self, messages: Sequence[Message], tools: Any = None) -> str:
        """The special token that any message behind `messages` begins with, "" if there is none."""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            text = self.text(messages, tools)
            longer = self.text([*messages, {"role": role, "content": "a"}], tools)
        except SkipRow:
            return ""
        return self.stop_at(longer, len(text)) if longer.startswith(text) else ""

    def stop_at(self, text: str, position: int) -> str:
        """The special token whose text begins at `position`, "" if there is none."""
        return next((stop for stop in self.stops if text.startswith(stop, position)), "")


def template_source(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> str:
    """The chat template's text. Raises ValueError when the tokenizer has none or it does not compile."""
    try:
        source = tokenizer.get_chat_template(None, tools)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'!r} has no chat template, which rows of messages "
            "need; set tokenizer.chat_template, or give rows of text or of input_ids + loss_mask"
        ) from error
    try:
        render_jinja_template([[]], chat_template="{% if false %}" + source + "{% endif %}")
    except TemplateSyntaxError as error:
        raise ValueError(f"the tokenizer's chat template is not valid Jinja (line {error.lineno}): {error}") from error
    return source


def text_only(messages: Sequence[Message]) -> bool:
    """Whether the messages hold a role and content, and nothing else."""
    return all(message.keys() == {"role", "content"} for message in messages)


def common_length(a: str, b: str) -> int:
    """Characters that two texts share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())[:200]
    return f"the chat template refused the conversation: {message or type(error).__name__}"


def _arguments_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
