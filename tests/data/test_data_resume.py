"""A stopped preparation goes on where it was, and gives what an uninterrupted one gives."""

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import chat_templates as t
import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import chats, make_tokenizer, user, write

from dflash_lightning.data import chunks, load_rows, parts, prepare, prepare_rows, read_report

OPTIONS = {"max_seq_len": 200, "progress": False, "workers": 1}


def write_as(kind, folder, records):
    lines = "".join(json.dumps(record) + "\r\n\r\n" for record in records).encode()
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines[: len(lines) // 2] + b"broken \xff\n" + lines[len(lines) // 2 :])
        return folder / "a.jsonl"
    if kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
        return folder / "a.jsonl.gz"
    if kind == "array":
        (folder / "a.json").write_text(json.dumps(records)[:-1] + ", oops]")
        return folder / "a.json"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet", row_group_size=11)
        return folder / "a.parquet"
    datasets.Dataset.from_list(records).save_to_disk(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture
def small(monkeypatch):
    """Chunks of 5 records; every chunk ends a part."""
    monkeypatch.setattr(chunks, "_RECORDS", 5)
    monkeypatch.setattr(parts, "_PART_TOKENS", 1)
    monkeypatch.setattr(parts, "_PENDING_TOKENS", 1)


def stop_after(monkeypatch, count, error=KeyboardInterrupt):
    """The next preparation stops behind its part number `count`."""
    before = parts.PartWriter.end_part

    def stopping(self):
        before(self)
        if len(self.parts) == count:
            monkeypatch.setattr(parts.PartWriter, "end_part", before)
            raise error

    monkeypatch.setattr(parts.PartWriter, "end_part", stopping)


def counted(monkeypatch):
    """A list that grows with each chunk that is made."""
    made = []
    before = prepare.chunk_rows
    monkeypatch.setattr(prepare, "chunk_rows", lambda *args: made.append(args[0]) or before(*args))
    return made


@pytest.mark.parametrize("kind", ["jsonl", "gz", "array", "parquet", "folder"])
@pytest.mark.parametrize("stops", [[1], [3, 4], [8, 11]])
def test_stopped_run_goes_on_and_gives_the_same(tmp_path, monkeypatch, small, kind, stops):
    tokenizer = make_tokenizer(t.CHATML)
    odd = [{"messages": [user("a")]}, {"messages": [{"role": "x", "content": "y"}]}]
    paths = [write_as(kind, tmp_path, [*chats(33), *odd]), write(tmp_path / "b.jsonl", chats(21, start=40))]
    whole = prepare_rows(paths, tokenizer, tmp_path / "whole", weights=[2, 0.5], **OPTIONS)
    for count in stops:
        stop_after(monkeypatch, count)
        with pytest.raises(KeyboardInterrupt):
            prepare_rows(paths, tokenizer, tmp_path / "out", weights=[2, 0.5], **OPTIONS)
        assert not (tmp_path / "out").exists()
    made = counted(monkeypatch)
    report = prepare_rows(paths, tokenizer, tmp_path / "out", weights=[2, 0.5], **OPTIONS)
    assert sum(chunk.records for chunk in made) < 100
    assert report.as_dict() == whole.as_dict()
    assert load_rows(tmp_path / "out").to_list() == load_rows(tmp_path / "whole").to_list()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("change", ["input", "option", "weights", "tokenizer"])
def test_something_else_starts_anew(tmp_path, monkeypatch, small, change):
    tokenizer, path, options = make_tokenizer(t.CHATML), write(tmp_path / "a.jsonl", chats(40)), dict(OPTIONS)
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare_rows(path, tokenizer, tmp_path / "out", **options)
    if change == "input":
        write(tmp_path / "a.jsonl", chats(40, start=1))
    elif change == "tokenizer":
        tokenizer = make_tokenizer(t.SMOLLM2)
    else:
        options |= {"max_seq_len": 20} if change == "option" else {"weights": [2]}
    report = prepare_rows(path, tokenizer, tmp_path / "out", **options)
    assert report.as_dict() == prepare_rows(path, tokenizer, tmp_path / "fresh", **options).as_dict()


def test_what_a_kill_cut_off_is_thrown_away(tmp_path, monkeypatch, small):
    tokenizer, path = make_tokenizer(t.CHATML), write(tmp_path / "a.jsonl", chats(40))
    whole = prepare_rows(path, tokenizer, tmp_path / "whole", **OPTIONS)
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare_rows(path, tokenizer, tmp_path / "out", **OPTIONS)
    work = tmp_path / ".out.partial"
    (work / "rows" / "part.tmp").write_bytes(b"half")
    (work / "rows" / "data-00003.arrow").write_bytes(b"whole, but not yet counted")
    (work / "rows" / "data-00099.arrow").write_bytes(b"of a run with other parts")
    (work / "2.json").write_text('{"file": 0, "rec')
    assert prepare_rows(path, tokenizer, tmp_path / "out", **OPTIONS).content_hash == whole.content_hash
    assert len(load_rows(tmp_path / "out")) == 40
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in (tmp_path / "whole").iterdir()
    }


def test_a_wrong_input_leaves_no_parts(tmp_path, small):
    paths = [write(tmp_path / "a.jsonl", chats(40)), write(tmp_path / "b.jsonl", [{"question": "x"}])]
    with pytest.raises(ValueError, match=r"b\.jsonl.*no usable column"):
        prepare_rows(paths, make_tokenizer(t.CHATML), tmp_path / "out", **OPTIONS)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_file_that_grows_while_it_is_read_is_named(tmp_path, monkeypatch, small):
    path = Path(write(tmp_path / "a.jsonl", chats(40)))
    before = prepare.chunk_rows

    def growing(*args):
        with path.open("a") as stream:
            stream.write("\n")
        return before(*args)

    monkeypatch.setattr(prepare, "chunk_rows", growing)
    with pytest.raises(ValueError, match=r"data\.train: .*a\.jsonl' changed while it was read"):
        prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "out", **OPTIONS)


def test_two_runs_at_once_into_one_folder(tmp_path):
    path = write(tmp_path / "a.jsonl", chats(4))
    with (
        parts.lock(tmp_path / "out", False, "data.train"),
        pytest.raises(ValueError, match="another process is preparing"),
    ):
        prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "out", **OPTIONS)
    prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "out", **OPTIONS)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_number_of_parts_is_bounded(tmp_path, monkeypatch, small):
    monkeypatch.setattr(parts, "_MOST_PARTS", 4)
    report = prepare_rows(
        write(tmp_path / "a.jsonl", chats(1000)), make_tokenizer(t.CHATML), tmp_path / "out", **OPTIONS
    )
    assert report.rows == 1000
    assert len(list((tmp_path / "out").glob("data-*.arrow"))) < 30  # of 200 chunks


SCRIPT = """
    import sys
    sys.path[:0] = [{tests!r}]
    from chat_templates import CHATML, make_tokenizer
    from dflash_lightning.data import parts, prepare
    parts._PART_TOKENS = parts._PENDING_TOKENS = 1
    prepare._BYTES_A_WORKER = 1
    print("started", flush=True)
    prepare.prepare_rows({path!r}, make_tokenizer(CHATML), {out!r}, max_seq_len=200, workers=2)
"""


def children_of(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_parallel_run_leaves_no_process_and_goes_on(tmp_path, monkeypatch, how):
    path, out = write(tmp_path / "a.jsonl", chats(12_000)), tmp_path / "out"
    code = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), path=path, out=str(out))
    # A session of its own: Ctrl-C in a terminal reaches all processes of the group.
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.PIPE)
    while not (tmp_path / ".out.partial" / "2.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    workers = children_of(process.pid)
    assert len(workers) == 2
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    process.communicate(timeout=20)
    assert process.returncode == -how
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    assert not out.exists()
    made = counted(monkeypatch)
    options = OPTIONS | {"max_seq_len": 200}
    report = prepare_rows(path, make_tokenizer(t.CHATML), out, **options)
    assert report.rows == 12_000
    assert sum(chunk.records for chunk in made) <= 12_000 - 3 * 256
    assert (
        read_report(out)["content_hash"]
        == prepare_rows(path, make_tokenizer(t.CHATML), tmp_path / "fresh", **options).content_hash
    )
