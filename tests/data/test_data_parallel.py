"""Preparation in several processes: the same rows, clear ends."""

import json
import os
import signal
import subprocess
import sys

import chat_templates as t
import pytest
from chat_templates import assistant, make_tokenizer, user
from transformers import PreTrainedTokenizerFast

from dflash_lightning.data import Renderer, chunks, load_rows, parts, pool, prepare, prepare_rows
from dflash_lightning.data.pool import WorkerPool

OPTIONS = {"max_seq_len": 200, "progress": False}
DEEP = json.loads('[{"function": {"name": "f", "arguments": {"x": ' + "[" * 600 + "]" * 600 + "}}}]")
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(chunks, "_RECORDS", 7)
    monkeypatch.setattr(prepare, "_BYTES_A_WORKER", 1)


def records(count):
    """Good ones of all kinds, and bad ones among them."""
    made = []
    for i in range(count):
        kinds = [
            {
                "messages": [
                    user(f"hello {i} 漢😀"),
                    assistant("fine " * (i % 5 + 1)),
                    user("and"),
                    assistant("\n  one"),
                ]
            },
            {"messages": [user(f"call {i}"), assistant("", tool_calls=CALL)], "tools": [{"name": "f"}]},
            {"text": f"text {i}"},
            {"input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]},
            {"messages": [user("no answer")]},
            {"messages": "not JSON"},
            {"messages": [user("deep"), assistant("x", tool_calls=DEEP)]},
        ]
        made.append(kinds[i % len(kinds)])
    return made


def write(path, values):
    lines = [json.dumps(value) for value in values]
    lines.insert(len(lines) // 2, "broken {")
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("kind", "source"), [("byte_level", t.QWEN3), ("slow", t.QWEN3)])
def test_rows_do_not_depend_on_the_number_of_workers_and_chunks(tmp_path, monkeypatch, kind, source):
    tokenizer = make_tokenizer(source, kind)
    path = write(tmp_path / "a.jsonl", records(105))
    one = prepare_rows(path, tokenizer, tmp_path / "one", workers=1, **OPTIONS)
    two = prepare_rows(path, tokenizer, tmp_path / "two", workers=2, **OPTIONS)
    monkeypatch.setattr(chunks, "_BYTES", 100)
    three = prepare_rows(path, tokenizer, tmp_path / "three", workers=3, **OPTIONS)
    assert one.as_dict() == two.as_dict() == three.as_dict()
    assert one.rows >= 60
    rows = [load_rows(tmp_path / name).to_list() for name in ("one", "two", "three")]
    assert rows[0] == rows[1] == rows[2]


def test_one_record_larger_than_all_limits_and_an_empty_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "_BYTES", 1000)
    huge = {"messages": [user("hello"), assistant("fine " * 200_000)]}
    path = write(tmp_path / "a.jsonl", [huge, huge])
    report = prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "out", workers=2, **OPTIONS)
    assert report.rows == 2
    assert report.lengths["max"] == 200


def test_tokenizer_that_no_other_process_can_have(tmp_path):
    class Local(PreTrainedTokenizerFast):
        pass

    tokenizer = Local(tokenizer_object=make_tokenizer(None).backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = t.CHATML
    path = write(tmp_path / "a.jsonl", records(40))
    with pytest.warns(UserWarning, match=r"data\.train: prepared in one process, since .*Local"):
        several = prepare_rows(path, tokenizer, tmp_path / "out", workers=2, **OPTIONS)
    assert several.content_hash == prepare_rows(path, tokenizer, tmp_path / "one", workers=1, **OPTIONS).content_hash


def test_killed_worker_is_named_and_the_next_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PART_TOKENS", 1)
    monkeypatch.setattr(parts, "_PENDING_TOKENS", 1)
    before = WorkerPool.configure
    started = []

    def killing(self, renderer):
        before(self, renderer)
        started.extend(worker.process.pid for worker in self._workers)
        os.kill(started[0], signal.SIGKILL)

    monkeypatch.setattr(WorkerPool, "configure", killing)
    path = write(tmp_path / "a.jsonl", records(105))
    with pytest.raises(ChildProcessError, match=r"was killed by SIGKILL; perhaps memory.*The same command goes on"):
        prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "out", workers=2, **OPTIONS)
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert (tmp_path / ".out.partial" / "0.json").exists()
    monkeypatch.setattr(WorkerPool, "configure", before)
    again = prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "out", workers=2, **OPTIONS)
    whole = prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "one", workers=1, **OPTIONS)
    assert again.as_dict() == whole.as_dict()


def test_error_in_a_worker_reaches_the_caller(tmp_path):
    tokenizer = make_tokenizer("{% for")  # met first in a worker: the first chunk holds text only
    path = write(tmp_path / "a.jsonl", [*[{"text": "hello there"}] * 20, *records(40)])
    with pytest.raises(ValueError, match="chat template is not valid Jinja"):
        prepare_rows(path, tokenizer, tmp_path / "out", workers=2, **OPTIONS)


def test_few_chunks_are_in_flight(tmp_path):
    taken = []

    def jobs():
        for number in range(40):
            taken.append(number)
            yield number, (chunks.Chunk("lines", number, 1, b'{"text": "hello there"}', 0), "a", 1.0)

    with WorkerPool(2) as workers:
        workers.configure(Renderer(make_tokenizer(t.CHATML), max_seq_len=100))
        done = []
        for tag, rows in workers.rows(jobs()):
            done.append((tag, rows.counts.rows))
            assert len(taken) - len(done) < 2 + pool._AHEAD
    assert done == [(number, 1) for number in range(40)]


def test_workers_import_neither_torch_nor_the_main_module():
    code = f"import sys; import {pool.__package__}.worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "__main__" not in pool._START


def test_bad_number_of_workers(tmp_path):
    with pytest.raises(ValueError, match="workers is 0; it must be at least 1"):
        prepare_rows(
            write(tmp_path / "a.jsonl", records(9)), make_tokenizer(t.CHATML), tmp_path / "o", max_seq_len=9, workers=0
        )
