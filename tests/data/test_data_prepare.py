"""Prepared folders: content, report, cache, atomicity, determinism, bad input."""

import json
import shutil
import threading

import chat_templates as t
import pytest
from chat_templates import assistant, chats, make_tokenizer, user, write

from dflash_lightning.data import (
    chunks,
    dataset_fingerprint,
    ensure_rows,
    is_prepared,
    load_rows,
    parts,
    prepare_rows,
    read_report,
)


@pytest.fixture
def options():
    return {"max_seq_len": 200, "progress": False}


def test_rows_report_and_lengths(tmp_path, tokenizer, options):
    path = write(tmp_path / "a.jsonl", [*chats(300), {"messages": [{"role": "wizard", "content": "x"}]}, {"text": ""}])
    report = prepare_rows([path], tokenizer, tmp_path / "out", **options)
    rows = load_rows(tmp_path / "out")
    lengths = [len(ids) for ids in rows["input_ids"]]
    assert report.rows == report.records == len(rows) == 300
    assert rows[299]["source"] == "a.jsonl:300"
    on_disk = read_report(tmp_path / "out")
    assert on_disk == json.loads(json.dumps(report.as_dict()))
    assert on_disk["tokens"] == sum(lengths)
    assert on_disk["supervised_tokens"] == sum(map(sum, rows["loss_mask"]))
    assert (on_disk["lengths"]["min"], on_disk["lengths"]["max"]) == (min(lengths), max(lengths))
    assert on_disk["files"] == [
        {"name": "a.jsonl", "weight": 1.0, "records": 300, "rows": 300, "left_out": 0, "skipped": 2}
    ]
    assert report.num_skipped == 2
    assert next(iter(report.skipped)).startswith("unknown role 'wizard'")
    assert str(tmp_path) not in (tmp_path / "out" / "report.json").read_text()


def test_ready_rows_pass_through(tmp_path, tokenizer, options):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}])
    prepare_rows(path, tokenizer, tmp_path / "out", **options)
    row = load_rows(tmp_path / "out")[0]
    assert (row["input_ids"], row["loss_mask"]) == ([5, 6, 7], [0, 1, 1])


def test_content_hash_depends_on_content_alone(tmp_path, tokenizer, options, monkeypatch):
    one = prepare_rows(write(tmp_path / "a.jsonl", chats(20)), tokenizer, tmp_path / "one", **options)
    paths = [write(tmp_path / "b.jsonl", chats(8)), write(tmp_path / "c.jsonl", chats(12, start=8))]
    monkeypatch.setattr(chunks, "_RECORDS", 3)
    monkeypatch.setattr(parts, "_PART_TOKENS", 1)
    two = prepare_rows(paths, tokenizer, tmp_path / "two", **options)
    assert one.content_hash == two.content_hash
    rows = load_rows(tmp_path / "two")
    assert dataset_fingerprint(rows) == one.content_hash
    assert dataset_fingerprint(rows.select(range(20))) == one.content_hash  # computed, not read
    assert dataset_fingerprint(rows.select(reversed(range(20)))) != one.content_hash
    shutil.move(tmp_path / "two", tmp_path / "moved")
    assert dataset_fingerprint(load_rows(tmp_path / "moved")) == one.content_hash


def test_rows_of_several_shards(tmp_path, tokenizer, options, monkeypatch):
    path = write(tmp_path / "a.jsonl", chats(50))
    prepare_rows(path, tokenizer, tmp_path / "one", **options)
    monkeypatch.setattr(chunks, "_RECORDS", 3)
    monkeypatch.setattr(parts, "_PART_TOKENS", 100)
    monkeypatch.setattr(parts, "_PENDING_TOKENS", 1)
    prepare_rows(path, tokenizer, tmp_path / "many", **options)
    assert len(list((tmp_path / "many").glob("data-*.arrow"))) > 5
    one, many = load_rows(tmp_path / "one"), load_rows(tmp_path / "many")
    assert many.to_list() == one.to_list()
    assert dataset_fingerprint(many.select(range(50))) == dataset_fingerprint(one)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_is_left_when_it_stops_before_the_first_part(tmp_path, tokenizer, options, monkeypatch, error):
    def failing(self):
        before(self)
        raise error

    before = parts.PartWriter._flush
    monkeypatch.setattr(parts.PartWriter, "_flush", failing)
    path = write(tmp_path / "a.jsonl", chats(3000))
    with pytest.raises(error):
        prepare_rows(path, tokenizer, tmp_path / "sub" / "out", **options)
    assert list((tmp_path / "sub").iterdir()) == []


def test_failure_keeps_the_folder_that_stood_there(tmp_path, tokenizer, options):
    prepare_rows(write(tmp_path / "a.jsonl", chats(5)), tokenizer, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="no row of"):
        prepare_rows(write(tmp_path / "b.jsonl", [{"text": ""}]), tokenizer, tmp_path / "out", **options)
    assert len(load_rows(tmp_path / "out")) == 5
    prepare_rows(write(tmp_path / "c.jsonl", chats(6)), tokenizer, tmp_path / "out", **options)
    assert len(load_rows(tmp_path / "out")) == 6
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl", "c.jsonl", "out"}


def test_other_folders_are_not_overwritten(tmp_path, tokenizer, options):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ValueError, match="exists and is no prepared folder"):
        prepare_rows(write(tmp_path / "a.jsonl", chats(2)), tokenizer, tmp_path / "out", **options)


def test_all_rows_bad_names_file_and_reasons(tmp_path, tokenizer, options):
    path = write(tmp_path / "a.jsonl", [{"messages": [user("a")]}] * 3 + [{"messages": [{"role": "x", "content": ""}]}])
    with pytest.raises(ValueError, match=r"data\.val: no row of .*a\.jsonl") as caught:
        prepare_rows(path, tokenizer, tmp_path / "out", option="data.val", **options)
    assert "3  no assistant text  (a.jsonl:1, a.jsonl:2, a.jsonl:3)" in str(caught.value)
    assert "unknown role 'x'" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_mask_token_in_a_few_rows_skips_them_and_in_many_is_an_error(tmp_path, tokenizer, options):
    mask = tokenizer.convert_tokens_to_ids("<tool_call>")
    odd = {"messages": [user("a <tool_call>"), assistant("fine thanks")]}
    path = write(tmp_path / "a.jsonl", [*chats(200), odd])
    report = prepare_rows(path, tokenizer, tmp_path / "out", mask_token_id=mask, **options)
    assert report.skipped == {f"contains the mask token id {mask}": {"count": 1, "sources": ["a.jsonl:201"]}}
    path = write(tmp_path / "b.jsonl", [*chats(20), odd, odd])
    with pytest.raises(ValueError, match=f"mask_token_id={mask} is a token in use: 2 of 22 records"):
        prepare_rows(path, tokenizer, tmp_path / "none", mask_token_id=mask, **options)


def test_target_vocabulary_smaller_than_the_tokenizers(tmp_path, tokenizer, options):
    with pytest.raises(ValueError, match="a token id is outside the vocabulary of 4"):
        prepare_rows(write(tmp_path / "a.jsonl", chats(2)), tokenizer, tmp_path / "out", vocab_size=4, **options)


def test_tokenizer_without_a_template(tmp_path, options):
    bare = make_tokenizer(None)
    with pytest.raises(ValueError, match="has no chat template"):
        prepare_rows(write(tmp_path / "a.jsonl", chats(2)), bare, tmp_path / "out", **options)
    prepare_rows(write(tmp_path / "b.jsonl", [{"text": "hello there"}]), bare, tmp_path / "out", **options)
    assert len(load_rows(tmp_path / "out")) == 1


def test_template_that_is_no_jinja(tmp_path, options):
    with pytest.raises(ValueError, match="chat template is not valid Jinja"):
        prepare_rows(write(tmp_path / "a.jsonl", chats(2)), make_tokenizer("{% for"), tmp_path / "out", **options)


@pytest.mark.parametrize("bad", [{"max_seq_len": 1}, {"min_supervised_tokens": 0}, {"min_supervised_tokens": 300}])
def test_bad_options(tmp_path, tokenizer, options, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        prepare_rows(write(tmp_path / "a.jsonl", chats(2)), tokenizer, tmp_path / "out", **(options | bad))


def test_min_supervised_tokens_and_long_rows(tmp_path, tokenizer, options):
    path = write(tmp_path / "a.jsonl", [*chats(7), {"messages": [user("a"), assistant("fine " * 500)]}])
    report = prepare_rows(path, tokenizer, tmp_path / "out", min_supervised_tokens=5, **options)
    assert report.lengths["max"] == max(map(len, load_rows(tmp_path / "out")["input_ids"])) == 200
    assert list(report.skipped) == ["fewer than 5 supervised tokens"]


def test_cache_is_keyed_by_content_template_tokenizer_options_and_rules(tmp_path, tokenizer, options, monkeypatch):
    path = write(tmp_path / "a.jsonl", chats(5))
    first = ensure_rows([path], tokenizer, tmp_path / "cache", **options)
    stamp = (first / "report.json").stat().st_mtime_ns
    copy = shutil.copy(path, tmp_path / "a.copy.jsonl")
    assert ensure_rows(path, tokenizer, tmp_path / "cache", **options) == first
    assert ensure_rows(copy, tokenizer, tmp_path / "cache", **options) == first
    tokenizer("padding and truncation are state of the tokenizer", truncation=True, max_length=2)
    assert ensure_rows(path, tokenizer, tmp_path / "cache", **options) == first
    assert (first / "report.json").stat().st_mtime_ns == stamp
    others = {
        ensure_rows(path, make_tokenizer(t.SMOLLM2), tmp_path / "cache", **options),
        ensure_rows(path, make_tokenizer(t.CHATML, "byte_fallback"), tmp_path / "cache", **options),
        ensure_rows(path, tokenizer, tmp_path / "cache", **(options | {"max_seq_len": 100})),
        ensure_rows(write(tmp_path / "a.jsonl", chats(6)), tokenizer, tmp_path / "cache", **options),
    }
    assert len(others) == 4
    assert first not in others
    monkeypatch.setattr("dflash_lightning.data.prepare.VERSIONS", (2, 99))
    assert ensure_rows(copy, tokenizer, tmp_path / "cache", **options) not in {first, *others}
    assert ensure_rows([first], tokenizer, tmp_path / "other", **options) == first
    assert not (tmp_path / "other").exists()


def test_several_prepared_folders_are_put_together(tmp_path, tokenizer, options):
    for name, count in (("x", 3), ("y", 4)):
        prepare_rows(write(tmp_path / f"{name}.jsonl", chats(count)), tokenizer, tmp_path / name, **options)
    folder = ensure_rows([tmp_path / "x", tmp_path / "y"], tokenizer, tmp_path / "cache", **options)
    assert len(load_rows(folder)) == 7


def test_calls_at_the_same_time_agree(tmp_path, tokenizer, options):
    path = write(tmp_path / "a.jsonl", chats(400))
    found = []
    calls = [
        threading.Thread(
            target=lambda: found.append(ensure_rows(path, make_tokenizer(t.CHATML), tmp_path / "cache", **options))
        )
        for _ in range(4)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(load_rows(found[0])) == 400
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [found[0].name]


def test_the_lock_is_held_by_one_at_a_time(tmp_path):
    held, most, done = [], [], []

    def take(name):
        for _ in range(1500):
            with parts.lock(tmp_path / "out", True, "data.train"):
                held.append(name)
                most.append(len(held))
                held.remove(name)
        done.append(name)

    calls = [threading.Thread(target=take, args=(name,)) for name in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert max(most) == 1
    assert not list(tmp_path.iterdir())


def test_load_rows_refuses_what_is_no_prepared_folder(tmp_path, tokenizer, options):
    with pytest.raises(FileNotFoundError, match=r"data\.val: there is no folder"):
        load_rows(tmp_path / "none", "data.val")
    with pytest.raises(ValueError, match="is no prepared folder"):
        load_rows(tmp_path)
    prepare_rows(write(tmp_path / "a.jsonl", chats(5)), tokenizer, tmp_path / "out", **options)
    report = read_report(tmp_path / "out")
    for change, message in (({"format_version": 99}, "format version 99"), ({"rows": 4}, "holds 5 rows, its report 4")):
        (tmp_path / "out" / "report.json").write_text(json.dumps(report | change))
        with pytest.raises(ValueError, match=message):
            load_rows(tmp_path / "out")
    assert is_prepared(tmp_path / "out")
