"""Readers: every format gives the same records; damaged files and records are named."""

import gzip
import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_lightning.data import chunks
from dflash_lightning.data.readers import read_records, resolve_files

VALUES = [{"messages": [{"role": "user", "content": f"hello {i} 😀"}]} for i in range(5)]
LINES = "".join(json.dumps(value) + "\n" for value in VALUES).encode()


def write_all(folder):
    table = pa.Table.from_pylist(VALUES)
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\n"))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "lines.json").write_bytes(LINES)
    (folder / "array.json").write_text(json.dumps(VALUES, indent=2, ensure_ascii=False), encoding="utf-8")
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    for name, make in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    datasets.Dataset.from_list(VALUES).save_to_disk(str(folder / "saved"))


@pytest.mark.parametrize("name", ["a.jsonl", "bom.jsonl", "a.jsonl.gz", "lines.json", "array.json", "a.parquet",
                                  "file.arrow", "stream.arrow", "saved"])  # fmt: skip
def test_every_format_gives_the_same_records(tmp_path, name):
    write_all(tmp_path)
    records = list(read_records(tmp_path / name))
    assert [record.value for record in records] == VALUES
    assert records[0].source == f"{name}:1"


def test_zst_needs_its_package_or_reads(tmp_path):
    zstandard = sys.modules.get("zstandard") or pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(LINES))
    assert [record.value for record in read_records(tmp_path / "a.jsonl.zst")] == VALUES


def test_a_zst_file_that_breaks_off_is_no_whole_one(tmp_path):
    zstandard = sys.modules.get("zstandard") or pytest.importorskip("zstandard")
    file = tmp_path / "a.jsonl.zst"
    frames = [zstandard.ZstdCompressor().compress(LINES) for _ in range(3)]
    file.write_bytes(b"".join(frames))
    assert [record.value for record in read_records(file)] == VALUES * 3
    file.write_bytes(b"".join(frames)[:-7])
    with pytest.raises(ValueError, match=r"data\.train: cannot read .*a\.jsonl\.zst.*breaks off inside a zstd frame"):
        list(read_records(file))
    file.write_bytes(frames[0] + b"no frame at all")
    with pytest.raises(ValueError, match="cannot read"):
        list(read_records(file))


def test_records_spread_over_lines(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(VALUES[0], indent=2))
    assert [record.value for record in read_records(file)] == VALUES[:1]
    file.write_text("\n".join(json.dumps(value, indent=2) for value in VALUES) + "\n\n")
    for piece in (5, chunks._PIECE):
        monkeypatch.setattr(chunks, "_PIECE", piece)
        assert [record.value for record in read_records(file)] == VALUES
    file.write_text(json.dumps(VALUES[0], indent=2)[:-4])
    (record,) = read_records(file)
    assert record.value is None
    assert "breaks off" in record.fault


def test_zst_without_its_package_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"data\.val.*a\.jsonl\.zst.*pip install zstandard"):
        list(read_records(tmp_path / "a.jsonl.zst", "data.val"))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_array_is_read_in_pieces(tmp_path, monkeypatch, chunk):
    write_all(tmp_path)
    monkeypatch.setattr(chunks, "_PIECE", chunk)
    assert [record.value for record in read_records(tmp_path / "array.json")] == VALUES


def test_null_fields_of_columnar_files_are_absent(tmp_path):
    calls = [{"arguments": {"x": 1}}, {"arguments": {"y": 2}}]
    pq.write_table(pa.Table.from_pylist([{"calls": calls}]), tmp_path / "a.parquet")
    (record,) = read_records(tmp_path / "a.parquet")
    assert record.value == {"calls": calls}


def test_bad_records_are_marked_and_the_rest_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\nnot json\n\n[1]\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"a": 2}\n"x"\nNaN\n')
    records = list(read_records(path))
    assert [(r.source, r.value, r.fault) for r in records] == [
        ("a.jsonl:1", {"a": 1}, ""),
        ("a.jsonl:2", None, "not JSON"),
        ("a.jsonl:4", None, "not a JSON object but list"),
        ("a.jsonl:5", None, "not UTF-8 text"),
        ("a.jsonl:6", None, "not JSON"),
        ("a.jsonl:7", {"a": 2}, ""),
        ("a.jsonl:8", None, "not a JSON object but str"),
        ("a.jsonl:9", None, "not a JSON object but float"),
    ]


@pytest.mark.parametrize(("tail", "faults"), [("]", 0), (", {", 1), ("", 1), (", oops]", 1)])
def test_damaged_array_gives_its_good_part_and_one_fault(tmp_path, tail, faults):
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}' + tail)
    records = list(read_records(tmp_path / "a.json"))
    assert [r.value for r in records if r.value] == [{"a": 1}, {"a": 2}]
    assert sum(r.value is None for r in records) == faults


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(LINES)[:-20] if name.endswith("gz") else b"rubbish rubbish")
    with pytest.raises(ValueError, match=rf"data\.train: cannot read .*{name}"):
        list(read_records(tmp_path / name))


def test_files_and_globs_are_resolved_in_order(tmp_path):
    write_all(tmp_path)
    names = [file.name for file in resolve_files([str(tmp_path / "array.json"), str(tmp_path / "*.arrow")])]
    assert names == ["array.json", "file.arrow", "stream.arrow"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none.jsonl", FileNotFoundError, "data.val: there is no file"),
        ("none*.jsonl", FileNotFoundError, "data.val: no file matches"),
        ("empty.jsonl", ValueError, "data.val: file .*empty.jsonl' is empty"),
        ("a.txt", ValueError, "data.val: cannot tell what .*a.txt' is"),
        ("folder", ValueError, "data.val: folder .*folder' was not written by"),
        ("splits", ValueError, r"data.val: .*splits' holds several splits \(train\)"),
    ],
)
def test_bad_paths_name_the_option_and_the_file(tmp_path, name, error, message):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(VALUES)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(error, match=message):
        resolve_files([tmp_path / name], "data.val")
    with pytest.raises(ValueError, match=r"data\.val is empty"):
        resolve_files([], "data.val")
