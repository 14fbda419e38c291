"""Weights of files and groups of rows: both follow from the content alone."""

import math

import chat_templates as t
import numpy as np
import pytest
from chat_templates import assistant, make_tokenizer, system, user, write

from dflash_lightning.data import ensure_rows, held_out, load_rows, prepare_rows
from dflash_lightning.data.identity import GROUPS, group_of
from dflash_lightning.data.messages import Chat, PlainText, ReadyRow, SkipRow

OPTIONS = {"max_seq_len": 200, "progress": False, "workers": 1}


def chats(count, start=0):
    return [{"messages": [user(f"hello {i}"), assistant("fine thanks")]} for i in range(start, start + count)]


def sources(folder):
    return load_rows(folder)["source"]


def test_weights_take_records_more_or_less_often(tmp_path, tokenizer):
    paths = [write(tmp_path / f"{name}.jsonl", chats(400, start)) for name, start in (("a", 0), ("b", 400), ("c", 800))]
    report = prepare_rows(paths, tokenizer, tmp_path / "out", weights=[2, 0.5, 1.25], **OPTIONS)
    found = list(sources(tmp_path / "out"))
    assert [found.count(f"a.jsonl:{i}") for i in range(1, 401)] == [2] * 400
    half = [found.count(f"b.jsonl:{i}") for i in range(1, 401)]
    assert set(half) == {0, 1}
    assert 160 < sum(half) < 240
    more = [found.count(f"c.jsonl:{i}") for i in range(1, 401)]
    assert set(more) == {1, 2}
    assert 70 < sum(more) - 400 < 130
    assert [(f["weight"], f["records"], f["rows"], f["left_out"]) for f in report.files] == [
        (2, 400, 800, 0),
        (0.5, sum(half), sum(half), 400 - sum(half)),
        (1.25, 400, sum(more), 0),
    ]
    assert report.left_out == 400 - sum(half)
    assert f"b.jsonl: weight 0.5, {sum(half)} records taken as {sum(half)} rows" in str(report)


def test_a_fraction_takes_the_same_records_whatever_stands_around_them(tmp_path, tokenizer):
    prepare_rows(write(tmp_path / "a.jsonl", chats(100)), tokenizer, tmp_path / "one", weights=[0.5], **OPTIONS)
    turned = [*chats(50, start=500), *reversed(chats(100))]
    prepare_rows(write(tmp_path / "b.jsonl", turned), tokenizer, tmp_path / "two", weights=[0.5], **OPTIONS)
    one = {int(source.split(":")[1]) - 1 for source in sources(tmp_path / "one")}
    two = {149 - (int(source.split(":")[1]) - 1) for source in sources(tmp_path / "two")}
    assert one == {number for number in two if number < 100}
    prepare_rows(str(tmp_path / "a.jsonl"), tokenizer, tmp_path / "more", weights=[0.7], **OPTIONS)
    assert set(sources(tmp_path / "one")) < set(sources(tmp_path / "more"))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"data\.train_weights holds 1 weights for 2 entries of data\.train"),
        ([1.0, 0.0], r"data\.train_weights: 0\.0 for .*b\.jsonl'; give a number above 0"),
        ([-1.0, 1.0], r"data\.train_weights: -1\.0 for .*a\.jsonl'"),
        ([math.nan, 1.0], r"data\.train_weights: nan for .*a\.jsonl'"),
        ([1.0, math.inf], r"data\.train_weights: inf for .*b\.jsonl'"),
    ],
)
def test_bad_weights_are_named(tmp_path, tokenizer, weights, message):
    paths = [write(tmp_path / f"{name}.jsonl", chats(3)) for name in "ab"]
    with pytest.raises(ValueError, match=message):
        prepare_rows(paths, tokenizer, tmp_path / "out", weights=weights, **OPTIONS)


def test_a_file_under_two_weights(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", chats(3))
    with pytest.raises(ValueError, match=r"--weights: two entries of --data give .*a\.jsonl' 1\.0 and 2\.0"):
        prepare_rows(
            [path, str(tmp_path / "*.jsonl")], tokenizer, tmp_path / "o", weights=[1.0, 2.0], option="--data", **OPTIONS
        )


def test_weights_are_part_of_the_cache_key(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", chats(20))
    plain = ensure_rows([path], tokenizer, tmp_path / "cache", **OPTIONS)
    assert ensure_rows([path], tokenizer, tmp_path / "cache", weights=[1], **OPTIONS) == plain
    twice = ensure_rows([path], tokenizer, tmp_path / "cache", weights=[2], **OPTIONS)
    assert len(load_rows(twice)) == 40
    # A prepared folder as it is, or its rows twice with the groups that they have.
    assert ensure_rows([plain], tokenizer, tmp_path / "cache", weights=[1], **OPTIONS) == plain
    again = ensure_rows([plain], tokenizer, tmp_path / "cache", weights=[2], **OPTIONS)
    assert load_rows(again)["group"] == load_rows(twice)["group"]


def test_rows_of_one_prompt_have_one_group(tmp_path, tokenizer):
    prompt = [system("be good"), user("hello")]
    records = [
        {"messages": [*prompt, assistant("one"), user("and"), assistant("two")]},
        {"conversations": [{"from": "system", "value": "be good"}, {"from": "human", "value": "hello"},
                           {"from": "gpt", "value": "another answer"}]},
        {"prompt": [{"role": "system", "content": "be good"}, user("hello")], "response": "third"},
        {"messages": [user("hello"), assistant("one")]},
    ]  # fmt: skip
    prepare_rows(write(tmp_path / "a.jsonl", records), make_tokenizer(t.QWEN3), tmp_path / "out", **OPTIONS)
    rows = load_rows(tmp_path / "out")
    groups = dict(zip(rows["source"], rows["group"], strict=True))
    assert len(rows) == 5  # the template rewrites the first one's earlier turn
    assert groups["a.jsonl:1"] == groups["a.jsonl:2"] == groups["a.jsonl:3"] != groups["a.jsonl:4"]
    assert len(set(rows["group"])) == 2


def test_groups_of_other_records():
    assert group_of(ReadyRow([5, 6, 7], [0, 0, 1])) == group_of(ReadyRow([5, 6, 8, 9], [0, 0, 1, 1]))
    assert group_of(ReadyRow([5, 6, 7], [0, 0, 1])) != group_of(ReadyRow([5, 7, 7], [0, 0, 1]))
    assert group_of(ReadyRow([5, 6], [1, 1])) != group_of(ReadyRow([6, 6], [1, 1]))
    assert group_of(PlainText("x" * 2000 + "a")) == group_of(PlainText("x" * 2000 + "b"))
    assert group_of(PlainText("xa")) != group_of(PlainText("xb"))
    # An opening by the assistant does not throw all such conversations together.
    greeting = assistant("Hi! How can I help?")
    assert group_of(Chat([greeting, user("a"), assistant("b")])) != group_of(
        Chat([greeting, user("c"), assistant("b")])
    )
    assert group_of(Chat([user("a"), assistant("b")])) == 2590662032134649203  # a change would move rows between sets


def test_what_is_nested_too_deeply_is_skipped():
    deep = None
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SkipRow, match="nested too deeply"):
        group_of(Chat([user("a"), {"role": "user", "content": deep}, assistant("b")]))


def test_held_out_rows_are_the_asked_share_and_stay_when_it_grows():
    groups = np.array([group_of(PlainText(str(i))) for i in range(4000)], dtype=np.uint64)
    few, many = held_out(groups, 0.05), held_out(groups, 0.3)
    assert abs(few.mean() - 0.05) < 0.012
    assert abs(many.mean() - 0.3) < 0.03
    assert not (few & ~many).any()
    assert not held_out(groups, 0.0).any()
    assert held_out(np.array([0, GROUPS - 1], dtype=np.uint64), 1 - 2**-53).tolist() == [True, False]
