"""Faults that users of this field have reported (chat data to ids and loss mask), by their numbers."""

import json

import chat_templates as t
import pytest
import torch
from chat_templates import assistant, make_tokenizer, runs, system, user, write
from rich.console import Console
from safetensors.torch import save_file

from dflash_lightning.data import SkipRow, ensure_rows, load_rows, prepare_rows, read_report, render_row, show_rows
from dflash_lightning.data.show import decoded
from dflash_lightning.drafter.layouts import read_fields
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.weights import load_drafter

GOOD = [user("hello"), assistant("good morning")]


def prepare(tmp_path, tokenizer, records, **options):
    options = {"max_seq_len": 500, "progress": False} | options
    report = prepare_rows(write(tmp_path / "in.jsonl", records), tokenizer, tmp_path / "out", **options)
    return report, load_rows(tmp_path / "out")


def test_c01_template_without_generation_tags_gives_no_empty_mask(tmp_path):
    for source in (t.CHATML, t.CHATML_NO_PROMPT, t.TAGGED):
        (row,) = render_row(make_tokenizer(source), GOOD, max_seq_len=500)
        assert runs(make_tokenizer(source), row) == ["good morning<|im_end|>"]
    report, rows = prepare(tmp_path, make_tokenizer(t.CHATML), [{"messages": GOOD}, {"messages": [user("a")]}])
    assert len(rows) == 1
    assert list(report.skipped) == ["no assistant text"]


def test_c02_conversations_that_the_template_refuses_are_skipped_with_its_reason(tmp_path):
    records = [{"messages": GOOD}] * 3
    records.insert(1, {"messages": [system("be good"), assistant("one")]})
    records.insert(2, {"messages": [assistant("one"), user("two")]})
    report, rows = prepare(tmp_path, make_tokenizer(t.QWEN35), records)
    assert len(rows) == 3
    ((reason, entry),) = report.skipped.items()
    assert "No user query found in messages." in reason
    assert entry == {"count": 2, "sources": ["in.jsonl:2", "in.jsonl:3"]}


@pytest.mark.parametrize("source", [t.QWEN3, t.QWEN35, t.DEEPSEEK_V31, t.PROMPT_ONLY_BLOCK])
def test_c03_tokens_before_the_first_supervised_one_are_the_generation_prompt(source):
    tokenizer = make_tokenizer(source)
    (row,) = render_row(tokenizer, GOOD, max_seq_len=500)
    switch = {"enable_thinking": False, "thinking": False}
    prompt = tokenizer.apply_chat_template(GOOD[:1], add_generation_prompt=True, **switch)["input_ids"]
    assert row.input_ids[: row.loss_mask.argmax()].tolist() == prompt
    assert "think" not in "".join(runs(tokenizer, row))


def test_c03_reasoning_is_not_dropped():
    for source in (t.QWEN3, t.QWEN35, t.DEEPSEEK_R1, t.DEEPSEEK_V31):
        tokenizer = make_tokenizer(source)
        for message in (assistant("one", reasoning_content="hm"), assistant("<think>\nhm\n</think>\n\none")):
            (row,) = render_row(tokenizer, [user("hello"), message], max_seq_len=500)
            (text,) = runs(tokenizer, row)
            assert text.index("hm") < text.index("</think>") < text.index("one")
            assert tokenizer.decode(row.input_ids).count("<think>") == 1


@pytest.mark.parametrize("source", [t.LLAMA3, t.GEMMA, t.MISTRAL, t.DEEPSEEK_V31])
def test_c04_exactly_one_bos_and_the_templates_ids(source):
    tokenizer = make_tokenizer(source)
    (row,) = render_row(tokenizer, GOOD, max_seq_len=500)
    assert row.input_ids.tolist() == tokenizer.apply_chat_template(GOOD, tokenize=True)["input_ids"]
    assert row.input_ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("text", ["one", "<s>one"])
def test_c04_plain_text_has_one_bos_which_is_not_supervised(tmp_path, text):
    tokenizer = make_tokenizer(t.CHATML)
    _, rows = prepare(tmp_path, tokenizer, [{"text": text}])
    assert rows[0]["input_ids"].count(tokenizer.bos_token_id) == 1
    assert rows[0]["loss_mask"] == [0] + [1] * (len(rows[0]["input_ids"]) - 1)


@pytest.mark.parametrize("kind", ["byte_level", "trimmed", "byte_fallback", "slow"])
@pytest.mark.parametrize("text", ["😀b", "漢字", "e\u0301a", "\u0301a", "👩‍👩‍👧 b", " a", "  a", "\ta"])
def test_c05_characters_of_several_tokens_at_the_boundary(kind, text):
    tokenizer = make_tokenizer(t.CHATML, kind)
    (row,) = render_row(tokenizer, [user("hello 😀"), assistant(text), user("漢"), assistant("b😀")], max_seq_len=500)
    assert runs(tokenizer, row) == [f"{text}<|im_end|>", "b😀<|im_end|>"]


@pytest.mark.parametrize("kind", ["byte_level", "trimmed"])
@pytest.mark.parametrize("text", ["\na", "\n\n\na", "\n 😀"])
def test_c05_answer_whose_first_token_would_merge_with_the_header(kind, text):
    tokenizer = make_tokenizer(t.CHATML, kind)
    messages = [user("hello"), assistant(text), user("and"), assistant("one")]
    (row,) = render_row(tokenizer, messages, max_seq_len=500)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert row.input_ids[: row.loss_mask.argmax()].tolist() == prompt
    assert runs(tokenizer, row) == [f"{text}<|im_end|>", "one<|im_end|>"]
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_c06_answer_before_a_prompt_that_is_too_long_is_kept():
    tokenizer = make_tokenizer(t.CHATML)
    whole = render_row(tokenizer, GOOD, max_seq_len=500)[0]
    (row,) = render_row(tokenizer, [*GOOD, user("hello " * 300), assistant("one")], max_seq_len=100)
    assert len(row.input_ids) == 100
    assert row.loss_mask.sum() == whole.loss_mask.sum()


def test_c06_rows_without_supervised_tokens_after_truncation_are_counted(tmp_path):
    long = [user("hello " * 300), assistant("one")]
    report, rows = prepare(tmp_path, make_tokenizer(t.CHATML), [{"messages": GOOD}, {"messages": long}], max_seq_len=50)
    assert len(rows) == 1
    assert report.skipped == {
        "no supervised tokens left after truncation to 50": {"count": 1, "sources": ["in.jsonl:2"]}
    }


@pytest.mark.parametrize("last", [[], [user("thanks")]])
def test_c07_stop_token_at_the_start_of_the_next_message_is_learned_on_every_turn(last):
    tokenizer = make_tokenizer(t.GLM)
    messages = [user("hello"), assistant("one"), user("and"), assistant("two"), *last]
    (row,) = render_row(tokenizer, messages, max_seq_len=500)
    assert runs(tokenizer, row) == ["one<|user|>", "two<|user|>"]
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    assert row.input_ids[: len(ids)].tolist() == ids
    assert len(row.input_ids) - len(ids) == (0 if last else 1)


def test_c08_file_with_text_only_is_used_and_one_without_any_column_is_refused(tmp_path):
    tokenizer = make_tokenizer(t.CHATML)
    _, rows = prepare(tmp_path, tokenizer, [{"text": "hello there"}, {"text": "good morning", "conversations": []}])
    assert [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows] == [
        "hello there",
        "good morning",
    ]
    path = write(tmp_path / "odd.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(ValueError, match=r"odd\.jsonl.*found question, answer; expected messages, conversations"):
        prepare_rows(path, tokenizer, tmp_path / "none", max_seq_len=500, progress=False)
    assert not (tmp_path / "none").exists()


def test_c09_rows_are_shown_with_their_supervised_text(tmp_path):
    tokenizer = make_tokenizer(t.CHATML)
    _, rows = prepare(tmp_path, tokenizer, [{"messages": GOOD}])
    console = Console(record=True, width=100, force_terminal=True, file=(tmp_path / "shown").open("w"))
    show_rows(rows, tokenizer, n=3, console=console)
    assert "\x1b[1;32m|good morning<|im_end|>|" in console.export_text(styles=True, clear=False)
    assert "row 0 from in.jsonl:1: " in console.export_text()


def test_c09_supervised_text_is_shown_turn_by_turn():
    tokenizer = make_tokenizer(t.CHATML)
    (row,) = render_row(tokenizer, [*GOOD, user("and"), assistant("two\nlines")], max_seq_len=500)
    text = decoded(row.input_ids.tolist(), row.loss_mask.astype(bool), tokenizer)
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert green == ["|good morning<|im_end|>|", "|two\nlines<|im_end|>|"]


def foreign():
    """A template whose special tokens the tokenizer does not have: each is many tokens of plain text."""
    return make_tokenizer(t.CHATML.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>"))


def test_c09_template_of_another_family_is_warned_of_when_prepared_and_at_every_later_use(tmp_path):
    path = write(tmp_path / "in.jsonl", [{"messages": GOOD}] * 5)
    message = (
        r"data\.train: the answers of 5 of 5 rows end in no special token of the tokenizer.*"
        r"another model\? its end-of-turn text '<\|end\|>' is the tokens \['<', .*ends in 'good morning<\|end\|>'"
    )
    for _ in range(2):  # prepared, then taken from the cache
        with pytest.warns(UserWarning, match=message):
            folder = ensure_rows(path, foreign(), tmp_path / "cache", max_seq_len=500, progress=False)
    with pytest.warns(UserWarning, match=message):
        ensure_rows(folder, foreign(), tmp_path / "cache", max_seq_len=500, progress=False)
    assert "no special token" in read_report(folder)["warnings"][0]


@pytest.mark.parametrize("source", [t.CHATML, t.QWEN3, t.LLAMA3, t.GEMMA, t.GLM, t.DEEPSEEK_R1, t.MISTRAL, t.TAGGED])
def test_c09_a_family_of_its_own_is_not_warned_of(tmp_path, recwarn, source):
    records = [{"messages": [*GOOD, user("and"), assistant("one " * 300)]}] * 3 + [
        {"messages": GOOD},
        {"text": "plain"},
    ]
    prepare(tmp_path, make_tokenizer(source), records, max_seq_len=100)
    assert not recwarn.list


def test_c09_no_supervised_turn_at_all_is_an_error(tmp_path):
    silent = make_tokenizer(t.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}"))
    with pytest.raises(ValueError, match=r"no row of .*in\.jsonl.* can be used"):
        prepare(tmp_path, silent, [{"messages": GOOD}] * 5)


def test_c10_a_drafter_with_another_vocabulary_or_a_map_is_refused(tmp_path):
    config = {
        "architectures": ["DFlashDraftModel"], "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "block_size": 4,
        "num_target_layers": 4, "max_position_embeddings": 64,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]},
    }  # fmt: skip
    model = DFlashDraftModel(read_fields(config, "test")[0])
    weights = model.state_dict()
    for changed, more, message in (
        ({}, {}, None),
        ({"draft_vocab_size": 16}, {}, r"draft_vocab_size=16.* is not supported"),
        ({}, {"d2t": torch.zeros(64, dtype=torch.int64)}, "d2t"),
        ({}, {"t2d": torch.ones(64, dtype=torch.bool)}, "t2d"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        save_file(weights | more, tmp_path / "model.safetensors")
        if message is None:
            load_drafter(tmp_path)
            continue
        with pytest.raises(ValueError, match=message):
            load_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    other = read_fields(config | {"vocab_size": 80}, "test")[0]
    with pytest.raises(ValueError, match="vocab_size"):
        load_drafter(tmp_path, expect=other)


def test_c11_empty_turn_adds_no_content_and_leaves_its_neighbours_alone():
    tokenizer = make_tokenizer(t.CHATML)
    around = [user("a"), assistant("one"), user("b"), assistant(""), user("c"), assistant("two")]
    (row,) = render_row(tokenizer, around, max_seq_len=500)
    assert runs(tokenizer, row) == ["one<|im_end|>", "<|im_end|>", "two<|im_end|>"]
    with pytest.raises(SkipRow, match="no assistant text"):
        render_row(tokenizer, [user("a"), assistant("")], max_seq_len=500)
