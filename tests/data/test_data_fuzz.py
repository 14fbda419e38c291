"""Malformed records: rows or a reason, never a crash, and never a supervised token outside assistant text."""

import chat_templates as t
import pytest
from chat_templates import make_tokenizer, runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_lightning.data import Renderer, SkipRow, parse_record
from dflash_lightning.data.messages import Chat

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TEMPLATES = [t.CHATML, t.QWEN3, t.QWEN35, t.LLAMA3, t.GEMMA, t.MISTRAL, t.GLM, t.DEEPSEEK_R1, t.TAGGED]
RENDERERS = [Renderer(make_tokenizer(source), max_seq_len=400) for source in TEMPLATES]

text = st.text(max_size=12) | st.sampled_from(
    ["", "\n", " a", "hello", "<|im_end|>", "</think>", "<think>\nx\n</think>\n\ny"]
)
scalar = st.none() | st.booleans() | st.integers() | st.floats() | text
json_value = st.recursive(scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
role = st.sampled_from(["system", "developer", "user", "assistant", "tool", "human", "gpt"])
call = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": text, "arguments": json_value})}) | json_value
message = st.fixed_dictionaries(
    {},
    optional={
        "role": role | scalar,
        "content": text | json_value,
        "from": role,
        "value": text,
        "tool_calls": st.lists(call, max_size=2) | scalar,
        "reasoning_content": text | scalar,
    },
)
record = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(message | json_value, max_size=4) | scalar,
        "conversations": st.lists(message, max_size=4),
        "prompt": text | json_value,
        "response": text | json_value,
        "text": text | json_value,
        "tools": json_value,
        "input_ids": st.lists(scalar, max_size=4),
        "loss_mask": st.lists(scalar, max_size=4),
    },
)


@SETTINGS
@given(record=record, number=st.integers(0, len(TEMPLATES) - 1))
def test_any_record_gives_rows_or_a_reason(record, number):
    renderer = RENDERERS[number]
    try:
        (result,) = renderer.rows([parse_record(record, renderer.vocab_size)])
    except SkipRow as skip:
        result = skip
    if isinstance(result, SkipRow):
        assert str(result)
        return
    for row in result:
        assert len(row.input_ids) == len(row.loss_mask) <= 400
        assert set(row.loss_mask.tolist()) <= {0, 1}
        assert row.loss_mask.sum() >= 2


# Letters say who wrote a text: of the supervised tokens none may decode to a letter of the other's.
marks = st.lists(st.sampled_from(["", " ", "\n", "\n\n", "😀", "漢", "\u0301"]), max_size=3).map("".join)
turn = st.tuples(marks, marks)


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
@settings(SETTINGS, max_examples=25)
@given(turns=st.lists(st.tuples(turn, turn, st.booleans()), min_size=1, max_size=3))
def test_no_token_outside_assistant_text_is_supervised(number, turns):
    renderer = RENDERERS[number]
    messages = []
    for asked, answered, reasoned in turns:
        messages.append({"role": "user", "content": f"{asked[0]}Q{asked[1]}"})
        messages.append({"role": "assistant", "content": f"{answered[0]}Z{answered[1]}"})
        if reasoned:
            messages[-1]["reasoning_content"] = "Z"
    (result,) = renderer.rows([Chat(messages)])
    assert not isinstance(result, SkipRow), result
    supervised = "".join(run for row in result for run in runs(renderer.tokenizer, row))
    assert "Q" not in supervised
    assert supervised.count("Z") >= len(turns)
    allowed = {
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "</s>",
        "<|user|>",
        t.END[t.DEEPSEEK_R1],
    }
    special = {str(token) for token in renderer.tokenizer.added_tokens_decoder.values()} - allowed
    assert not [token for token in special if token in supervised]
