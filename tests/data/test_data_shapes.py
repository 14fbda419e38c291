"""The short way for conversations of a known shape gives what rendering turn by turn gives."""

import chat_templates as t
import pytest
from chat_templates import assistant, make_tokenizer, system, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_lightning.data import Renderer, SkipRow, shapes, turns
from dflash_lightning.data.messages import Chat

# One that looks at what stands last: the history of a turn differs from the same messages inside the whole.
REMINDED = t.CHATML.replace("m.content + '", "m.content + (' remember' if loop.last and m.role == 'user' else '') + '")
# One that looks at a content: no probe meets it.
PICKY = t.CHATML.replace(
    "m.content + '", "m.content + (' odd' if m.content == 'a' and not add_generation_prompt else '') + '"
)
TEMPLATES = [t.CHATML, t.QWEN3, t.QWEN35, t.LLAMA3, t.GEMMA, t.MISTRAL, t.SMOLLM2, t.GLM, t.DEEPSEEK_V31,
             t.DEEPSEEK_R1, t.CHATML_NO_PROMPT, t.TAGGED, t.PROMPT_ONLY_BLOCK, t.PLAIN, REMINDED, PICKY]  # fmt: skip
FAST = {t.CHATML, t.LLAMA3, t.GEMMA, t.SMOLLM2, t.DEEPSEEK_V31}

content = st.sampled_from(
    ["one", "two ", "\n\nthree", "", " ", "a", "<|im_end|>", "<think>\nx\n</think>\n\ny", "</think>"]
)
message = st.builds(dict, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=content)
conversation = st.lists(message, min_size=1, max_size=6) | st.lists(
    st.tuples(content, content), min_size=1, max_size=3
).map(lambda turns: [m for q, a in turns for m in (user(q), assistant(a))])


def texts(renderer, messages):
    try:
        return renderer.texts(Chat(messages))
    except SkipRow as skip:
        return str(skip)


def slow_renderer(source):
    renderer = Renderer(make_tokenizer(source), max_seq_len=1000)
    renderer.template().shapes.find = lambda messages: None
    return renderer


@pytest.mark.parametrize("source", TEMPLATES[:-1], ids=range(len(TEMPLATES) - 1))
def test_shapes_change_nothing(source, monkeypatch):
    monkeypatch.setattr(shapes, "_CHECKED", 0)
    fast, slow = Renderer(make_tokenizer(source), max_seq_len=1000), slow_renderer(source)

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages=conversation)
    def check(messages):
        assert texts(fast, messages) == texts(slow, messages)

    check()


@pytest.mark.parametrize("source", TEMPLATES, ids=range(len(TEMPLATES)))
def test_known_shapes_are_rendered_once(source, monkeypatch):
    renderer = Renderer(make_tokenizer(source), max_seq_len=1000)
    messages = [system("be good"), user("hello"), assistant("one"), user("and"), assistant("two")]
    for _ in range(4):
        assert texts(renderer, messages) == texts(slow_renderer(source), messages)
    rendered = []
    before = type(renderer.template()).text
    monkeypatch.setattr(type(renderer.template()), "text", lambda *a, **k: rendered.append(a) or before(*a, **k))
    texts(renderer, messages)
    assert (len(rendered) == 1) == (source in FAST | {PICKY})


def test_a_template_that_looks_at_contents_is_found_out_by_its_first_conversations():
    fast, slow = Renderer(make_tokenizer(PICKY), max_seq_len=1000), slow_renderer(PICKY)
    for _ in range(2):
        messages = [user("a"), assistant("one"), user("and"), assistant("two")]
        assert texts(fast, messages) == texts(slow, messages)


def test_the_whole_text_is_compared_not_its_length(monkeypatch):
    monkeypatch.setattr(shapes, "_CHECKED", 0)
    # One character less before the answer, one more behind it.
    source = t.CHATML.replace("m.content + '", "(m.content | trim) + (' ' if m.content == 'one' else '') + '")
    messages = [user("hello "), assistant("one")]
    fast = Renderer(make_tokenizer(source), max_seq_len=1000)
    assert texts(fast, messages) == texts(slow_renderer(source), messages)


def test_fast_rendering_is_the_tokenizers_own():
    class Shouting(type(make_tokenizer(t.CHATML))):
        def apply_chat_template(self, *args, **kwargs):
            return super().apply_chat_template(*args, **kwargs).upper()

    tokenizer = Shouting(tokenizer_object=make_tokenizer(None).backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = t.CHATML
    template = Renderer(tokenizer, max_seq_len=100).template()
    for _ in range(40):
        assert template.text([user("hello")]) == "<|IM_START|>USER\nHELLO<|IM_END|>\n"


def test_spans_of_a_known_shape():
    renderer = Renderer(make_tokenizer(t.LLAMA3), max_seq_len=1000)
    for _ in range(5):
        (text,) = renderer.texts(Chat([user("one one"), assistant("one"), user("one"), assistant("two")]))
        assert [text.text[s.start : s.end] for s in text.spans] == ["one<|eot_id|>", "two<|eot_id|>"]
        assert isinstance(text.spans[0], turns.Span)


def test_offsets_that_tell_too_much_are_checked_before_a_turn_is_given_up(monkeypatch):
    encoder = Renderer(make_tokenizer(t.CHATML), max_seq_len=1000).encoder
    text = turns.SupervisedText("hello<|im_end|>one<|im_end|>", 1, [turns.Span(15, 18, 28)])
    ((ids, offsets),) = encoder.encode([text.text])

    class Early:  # as normalizers make them: each token begins one character too early
        char_to_token = staticmethod(offsets.char_to_token)

        @staticmethod
        def token_to_chars(token):
            start, end = offsets.token_to_chars(token)
            return start - 1, end

    monkeypatch.setattr(encoder, "_pieces", lambda text, cuts: None)
    _, mask, faults = encoder.row(text, ids, Early)
    assert encoder.tokenizer.decode(ids[mask == 1]) == "one<|im_end|>"
    assert not faults
