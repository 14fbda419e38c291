"""Records in all accepted spellings, and the reasons for those that cannot be used."""

import pytest

from dflash_lightning.data import SkipRow, parse_record
from dflash_lightning.data.messages import Chat, PlainText, ReadyRow

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [USER, ANSWER]),
        ({"messages": '[{"role": "user", "content": "a"}]'}, [USER]),
        ({"prompt": "a", "response": "b"}, [USER, ANSWER]),
        ({"system": "s", "prompt": "a", "response": "b"}, [{"role": "system", "content": "s"}, USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"system": "s", "messages": [USER]}, [{"role": "system", "content": "s"}, USER]),
        ({"messages": [{"role": "developer", "content": "d"}]}, [{"role": "developer", "content": "d"}]),
        ({"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]},
         [{"role": "user", "content": "ab"}]),
        ({"messages": [{**ANSWER, "reasoning": "r"}]}, [{**ANSWER, "reasoning_content": "r"}]),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
         [{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": null}'}]}]},
         [{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        ({"messages": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": null}}'}]},
         [{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "i", "name": "f", "extra": 1}]},
         [{"role": "tool", "content": "1", "tool_call_id": "i", "name": "f"}]),
    ],
)  # fmt: skip
def test_spellings_of_a_conversation(record, messages):
    parsed = parse_record(record)
    assert isinstance(parsed, Chat)
    assert parsed.messages == messages


def test_other_kinds_of_rows():
    assert parse_record({"text": "a", "messages": None}) == PlainText("a")
    assert parse_record({"input_ids": [1, 2], "loss_mask": [False, True]}, 3) == ReadyRow([1, 2], [0, 1])
    tools = [{"type": "function"}]
    parsed = parse_record({"messages": [USER], "tools": '[{"type": "function"}]'})
    assert parsed == Chat([USER], tools)


def message(**fields):
    return {"messages": [{**USER, **fields}]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (message(role="wizard"), "unknown role 'wizard'"),
        (message(role=None), "a message's role is null"),
        (message(role=3), "a message's role is int"),
        (message(content=3), "a message's content is int"),
        (message(content=None), "a user message has no content"),
        (message(content=[{"type": "image_url", "image_url": {}}]), "a part of type 'image_url'"),
        (message(content=[{"type": "input_audio"}]), "a part of type 'input_audio'"),
        (message(content=[{"text": 3}]), "a text part is int"),
        (message(role="assistant", content=None), "an assistant message has no content"),
        (message(role="assistant", tool_calls=3), "tool_calls is int"),
        (message(role="assistant", tool_calls=[3]), "a tool call is int"),
        (message(role="assistant", tool_calls=[{"function": {}}]), "a tool call has no function name"),
        (message(role="assistant", tool_calls=[{"name": "f", "arguments": 3}]), "arguments are int"),
        ({"messages": [USER], "images": ["x"]}, "has images"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [3]}, "a message is int"),
        ({"messages": {"role": "user"}}, "messages is dict"),
        ({"messages": "no json"}, "messages is text that is not JSON"),
        ({"messages": [USER], "tools": 3}, "tools is not a list"),
        ({"text": 3}, "text is int"),
        ({"prompt": "a"}, "no usable column"),
        ({}, "no usable column"),
        ({"input_ids": [1], "loss_mask": [1, 0]}, "differ in length"),
        ({"input_ids": [1.0], "loss_mask": [1]}, "input_ids is not a list of integers"),
        ({"input_ids": [True], "loss_mask": [1]}, "input_ids is not a list of integers"),
        ({"input_ids": [1], "loss_mask": ["1"]}, "loss_mask is not a list of integers"),
        ({"input_ids": [1], "loss_mask": [2]}, "something else than 0 and 1"),
        ({"input_ids": [9], "loss_mask": [1]}, "outside the vocabulary of 9"),
        ({"input_ids": [-1], "loss_mask": [1]}, "outside the vocabulary of 9"),
    ],
)  # fmt: skip
def test_reasons(record, reason):
    with pytest.raises(SkipRow, match=reason):
        parse_record(record, vocab_size=9)
