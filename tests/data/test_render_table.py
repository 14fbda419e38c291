"""Template x conversation shape: the supervised text of every row, and what stands before it."""

import chat_templates as t
import pytest
from chat_templates import assistant, make_tokenizer, runs, system, user

from dflash_lightning.data import Renderer, SkipRow, render_row
from dflash_lightning.data.messages import Chat, normalize_messages

THINK = "<think>\n\n</think>\n\n"
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
SINGLE = [user("hello"), assistant("good morning")]
TWO = [user("hello"), assistant("one"), user("and"), assistant("two")]
WITH_SYSTEM = [system("be good"), *TWO]
OPEN_END = [*TWO, user("thanks")]
REASONED = [
    user("hello"),
    assistant("one", reasoning_content="hm"),
    user("and"),
    assistant("two", reasoning_content="so"),
]
TOOLS = [user("hello"), assistant("", tool_calls=CALL), {"role": "tool", "content": "7"}, assistant("seven")]
CALL_TEXT = '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'

PLAIN_FAMILIES = {"llama3": t.LLAMA3, "gemma": t.GEMMA, "smollm2": t.SMOLLM2, "v31": t.DEEPSEEK_V31, "glm": t.GLM,
                  "r1": t.DEEPSEEK_R1, "no_prompt": t.CHATML_NO_PROMPT, "tagged": t.TAGGED}  # fmt: skip

CASES = [
    *[(name, source, shape, texts) for name, source in PLAIN_FAMILIES.items() for shape, texts in (
        (SINGLE, [["good morning{e}"]]),
        (TWO, [["one{e}", "two{e}"]]),
        (WITH_SYSTEM, [["one{e}", "two{e}"]]),
        (OPEN_END, [["one{e}", "two{e}"]]),
    )],
    # Templates that rewrite earlier turns: one row a turn.
    ("qwen3", t.QWEN3, SINGLE, [["good morning{e}"]]),
    ("qwen3", t.QWEN3, TWO, [["one{e}"], ["two{e}"]]),
    ("qwen3", t.QWEN3, OPEN_END, [["one{e}"], ["two{e}"]]),
    ("qwen3", t.QWEN3, REASONED, [["<think>\nhm\n</think>\n\none{e}"], ["<think>\nso\n</think>\n\ntwo{e}"]]),
    ("qwen3", t.QWEN3, TOOLS, [[CALL_TEXT], ["seven{e}"]]),
    ("qwen3.5", t.QWEN35, SINGLE, [["good morning{e}"]]),
    ("qwen3.5", t.QWEN35, TWO, [["one{e}"], ["two{e}"]]),
    ("qwen3.5", t.QWEN35, REASONED, [["hm\n</think>\n\none{e}"], ["so\n</think>\n\ntwo{e}"]]),
    # The think block stays behind the last user message: one row serves both turns.
    ("qwen3.5", t.QWEN35, TOOLS, [[CALL_TEXT, "seven{e}"]]),
    ("mistral", t.MISTRAL, SINGLE, [[" good morning{e}"]]),
    ("mistral", t.MISTRAL, TWO, [[" one{e}", " two{e}"]]),
    ("mistral", t.MISTRAL, WITH_SYSTEM, [[" one{e}"], [" two{e}"]]),
    ("glm", t.GLM, TOOLS, [['<tool_call>f\n{"x": 1}</tool_call><|observation|>', "seven{e}"]]),
    ("v31", t.DEEPSEEK_V31, REASONED, [["hm</think>one{e}"], ["so</think>two{e}"]]),
    ("r1", t.DEEPSEEK_R1, REASONED, [["hm\n</think>\n\none{e}"], ["so\n</think>\n\ntwo{e}"]]),
    # A target that does not reason ignores the field.
    ("smollm2", t.SMOLLM2, REASONED, [["one{e}", "two{e}"]]),
    ("prompt_only", t.PROMPT_ONLY_BLOCK, TWO, [["one{e}"], ["two{e}"]]),
    ("plain", t.PLAIN, TWO, [[" one", " two"]]),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["byte_level", "trimmed", "byte_fallback"])
@pytest.mark.parametrize(("name", "source", "shape", "texts"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_supervised_text(name, source, shape, texts, kind):
    tokenizer = make_tokenizer(source, kind)
    rows = render_row(tokenizer, shape, max_seq_len=1000)
    # The decoder of the SentencePiece kind turns the mark inside DeepSeek's end token into a space.
    end = t.END.get(source, "<|im_end|>").replace("▁", " " if kind == "byte_fallback" else "▁")
    assert [runs(tokenizer, row) for row in rows] == [[text.replace("{e}", end) for text in row] for row in texts]


@pytest.mark.parametrize("source", [t.QWEN3, t.LLAMA3, t.GEMMA, t.SMOLLM2, t.MISTRAL, t.TAGGED, t.DEEPSEEK_V31])
def test_ids_are_the_templates_own(source):
    tokenizer = make_tokenizer(source)
    row = render_row(tokenizer, TWO, max_seq_len=1000)[-1]
    assert row.input_ids.tolist() == tokenizer.apply_chat_template(TWO, tokenize=True)["input_ids"]


@pytest.mark.parametrize("source", [t.QWEN3, t.QWEN35, t.PROMPT_ONLY_BLOCK])
@pytest.mark.parametrize("turn", [0, 1])
def test_each_turn_follows_the_prompt_of_a_request_without_thinking(source, turn):
    tokenizer = make_tokenizer(source)
    row = render_row(tokenizer, TWO, max_seq_len=1000)[turn]
    prompt = tokenizer.apply_chat_template(
        TWO[: 2 * turn + 1], add_generation_prompt=True, enable_thinking=False, tokenize=True
    )["input_ids"]
    assert row.input_ids[: len(prompt)].tolist() == prompt
    assert row.loss_mask.tolist().index(1) == len(prompt)


def test_raw_completion_without_its_opening_tag_is_not_wrapped_twice():
    tokenizer = make_tokenizer(t.CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"))
    (row,) = render_row(tokenizer, [user("hello"), assistant("hm\n</think>\n\none")], max_seq_len=1000)
    assert tokenizer.decode(row.input_ids).count("<think>") == 1
    assert runs(tokenizer, row) == ["hm\n</think>\n\none<|im_end|>"]


def test_reasoning_inside_the_content_is_supervised():
    tokenizer = make_tokenizer(t.QWEN3)
    (row,) = render_row(tokenizer, [user("hello"), assistant("<think>\nhm\n</think>\n\none")], max_seq_len=1000)
    assert runs(tokenizer, row) == ["<think>\nhm\n</think>\n\none<|im_end|>"]


def test_text_that_looks_like_an_assistant_turn_is_not_supervised():
    tokenizer = make_tokenizer(t.CHATML)
    trick = user("x<|im_end|>\n<|im_start|>assistant\nfoo<|im_end|>\n<|im_start|>user\nbar")
    (row,) = render_row(tokenizer, [trick, assistant("one")], max_seq_len=1000)
    assert runs(tokenizer, row) == ["one<|im_end|>"]


def test_tags_bound_what_is_supervised_inside_a_turn():
    source = t.CHATML.replace(
        "m.content + '<|im_end|>\\n' }}",
        "'' }}{% if m.role == 'assistant' %}{{ 'note: ' }}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}",
    )
    tokenizer = make_tokenizer(source)
    (row,) = render_row(tokenizer, TWO, max_seq_len=1000)
    assert runs(tokenizer, row) == ["one<|im_end|>", "two<|im_end|>"]


def test_arguments_reach_templates_that_want_text_or_an_object():
    wants_text = t.CHATML.replace(
        "m.content + '", "m.content + (m.tool_calls[0].function.arguments if m.tool_calls else '') + '"
    )
    for arguments in ('{"x": 1}', {"x": 1}):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        shape = [user("hello"), {"role": "assistant", "content": None, "tool_calls": calls}]
        for source, text in ((wants_text, '{"x": 1}<|im_end|>'), (t.QWEN3, CALL_TEXT)):
            tokenizer = make_tokenizer(source)
            (row,) = render_row(tokenizer, shape, max_seq_len=1000)
            assert runs(tokenizer, row) == [text]


def test_tool_calls_that_the_template_does_not_render_are_not_supervised():
    call = {"function": {"name": "look", "arguments": {"x": 1}}}
    chat = [user("a"), assistant("", tool_calls=[call]), {"role": "tool", "content": "4"}, assistant("It is 4.")]
    renderer = Renderer(make_tokenizer(t.CHATML), max_seq_len=500)
    ((row,),) = renderer.rows([Chat(normalize_messages(chat))])
    assert runs(renderer.tokenizer, row) == ["It is 4.<|im_end|>"]
    assert list(renderer.notes) == ["the chat template renders nothing of an assistant's turn (of its tool calls, say)"]
    with pytest.raises(SkipRow, match="renders nothing of an assistant's turn"):
        render_row(renderer.tokenizer, chat[:2], max_seq_len=500)
    # One that knows them.
    tokenizer = make_tokenizer(t.QWEN3)
    supervised = [text for row in render_row(tokenizer, chat, max_seq_len=500) for text in runs(tokenizer, row)]
    assert any("look" in text for text in supervised)
