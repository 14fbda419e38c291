"""`dflash regenerate`: every conversation answered once, by a model here or by a server."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_lightning import regenerate
from dflash_lightning.cli import main
from dflash_lightning.data.answers import open_output


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def server(monkeypatch):
    """A small OpenAI-compatible server that fails every third request once."""
    monkeypatch.setattr(regenerate, "_BACKOFF_SECONDS", 0.01)
    seen: list[list[dict]] = []
    state = {"requests": 0, "broken": False}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "toy"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state["requests"] += 1
            if state["broken"] or state["requests"] % 3 == 0:
                self.send_error(503)
                return
            seen.append(body["messages"])
            text = f"answer {len(body['messages'])} to {body['messages'][-1]['content']}"
            reason = "length" if "long" in body["messages"][-1]["content"] else "stop"
            self.reply({"choices": [{"message": {"content": text}, "finish_reason": reason}]})

        def reply(self, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args) -> None:
            return None

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", seen, state
    httpd.shutdown()


def test_a_server_answers_turn_by_turn_and_nothing_is_asked_twice(server, tmp_path: Path) -> None:
    url, seen, state = server
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "OLD"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "OLD"},
    ]
    lines = [{"messages": chat}, {"id": "mine", "prompt": "three"}, {"messages": [{"role": "user", "content": "four"}]}]
    lines += [{"prompt": "a long one"}, {"messages": [{"role": "wizard", "content": "x"}]}]
    data, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    command = ["regenerate", "--target", url, "--data", str(data), "--out", str(out), "--concurrency", "3"]
    assert main(command) == 0
    rows = {row["id"]: row for row in rows_of(out)}
    assert set(rows) == {"in.jsonl:1", "mine", "in.jsonl:3", "in.jsonl:4"}
    first = rows["in.jsonl:1"]["messages"]
    assert [m["content"] for m in first] == ["one", "answer 1 to one", "two", "answer 3 to two"]
    assert "OLD" not in json.dumps(seen), "the target sees its own answers, not the source's"
    assert rows["in.jsonl:4"]["truncated"]

    asked = len(seen)
    kept = out.read_text()
    with out.open("a") as file:
        file.write('{"key": "cut off by a ki')
    assert main(command) == 0
    assert out.read_text() == kept
    out.write_text(kept[:-1])  # an editor, or a kill in front of the line's end
    assert main(command) == 0
    assert out.read_text() == kept
    without_keys = [{k: v for k, v in row.items() if k != "key"} for row in rows_of(out)]
    out.write_text("".join(json.dumps(row) + "\n" for row in without_keys) + '{"id": "cut off by a ki')
    data.write_text(data.read_text() + "\n" + json.dumps({"prompt": "five"}))
    assert main(command) == 0
    assert len(seen) == asked + 1
    assert [row["id"] for row in rows_of(out)][-1] == "in.jsonl:6"

    state["broken"] = True
    data.write_text(data.read_text() + "\n" + json.dumps({"prompt": "six"}))
    assert main([*command, "--retries", "1"]) == 1, "a failed row is no success, and stays open"
    state["broken"] = False
    assert main(command) == 0
    assert len(rows_of(out)) == 6


def test_rows_are_told_apart_by_what_they_hold(server, tmp_path: Path) -> None:
    """One id twice, one file name in two folders: no row is taken for another, and none is asked twice."""
    url, seen, _ = server
    files = [tmp_path / "a" / "in.jsonl", tmp_path / "b" / "in.jsonl"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        lines = [{"id": 7, "prompt": f"same id {number} {i}"} for i in range(2)] + [{"prompt": f"same name {number}"}]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    command = ["regenerate", "--target", url, "--data", *map(str, files), "--out", str(out)]
    assert main(command) == 0
    asked = [row["messages"][0]["content"] for row in rows_of(out)]
    assert sorted(asked) == sorted(set(asked))
    assert len(asked) == 6
    assert main(["regenerate", "--target", url, "--data", *map(str, reversed(files)), "--out", str(out)]) == 0
    assert len(rows_of(out)) == len(seen) == 6


SHAPES = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "OLD"}]},
    "question last": {"conversations": [{"from": "human", "value": "Q"}]},
    "JSON text": {"messages": json.dumps([{"role": "user", "content": "Q"}])},
    "prompt as messages": {"prompt": [{"role": "user", "content": "Q"}]},
    "prompt and response": {"prompt": "Q", "response": "OLD"},
    "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_every_shape_of_conversation_is_asked(server, tmp_path: Path, shape: str, system) -> None:
    url, seen, _ = server
    (tmp_path / "in.jsonl").write_text(json.dumps(SHAPES[shape] | ({"system": system} if system else {})))
    out = tmp_path / "out.jsonl"
    assert main(["regenerate", "--target", url, "--data", str(tmp_path / "in.jsonl"), "--out", str(out)]) == 0
    wanted = [{"role": "system", "content": system}] if system else []
    assert seen == [[*wanted, {"role": "user", "content": "Q"}]]
    assert rows_of(out)[0]["messages"] == [*seen[0], {"role": "assistant", "content": f"answer {len(seen[0])} to Q"}]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"my notes\nsecond line\n", 1), (b'{"foo": 1}\n', 1), (b"[1, 2]\n", 1), (b"one line without an end", 1),
        (b"\x00\xff\x80", 1), (b'{"key": "a", "id": "1", "messages": []}\nnotes\n', 2),
    ],
)  # fmt: skip
def test_a_foreign_output_file_is_left_alone(server, tmp_path: Path, capsys, content: bytes, line: int) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Q"}')
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    command = ["regenerate", "--target", server[0], "--data", str(tmp_path / "in.jsonl"), "--out", str(out)]
    assert main(command) == 2
    assert f"--out={out}: line {line} was not written by `dflash regenerate`" in capsys.readouterr().err
    assert out.read_bytes() == content


def test_one_output_file_has_one_writer(server, tmp_path: Path, capsys) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Q"}')
    out = tmp_path / "out.jsonl"
    with open_output(out):
        command = ["regenerate", "--target", server[0], "--data", str(tmp_path / "in.jsonl"), "--out", str(out)]
        assert main(command) == 2
    assert "another process writes it right now" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path)]) == 2
    assert f"--out={tmp_path}: this is a folder" in capsys.readouterr().err


def test_a_conversation_that_the_template_refuses_ends_no_other(tiny_target: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{% if 'no' in messages[0]['content'] %}{{ raise_exception('not that') }}{% endif %}" + (
        template.read_text()
    ))  # fmt: skip
    lines = ['{"prompt": "one"}', '{"prompt": "no"}', '{"prompt": "\\ud800"}', '{"prompt": "two"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    command = ["regenerate", "--target", str(folder), "--data", str(tmp_path / "in.jsonl"), "--out", str(out)]
    assert main([*command, "--max-new-tokens", "4", "--device", "cpu"]) == 1
    assert [row["messages"][0]["content"] for row in rows_of(out)] == ["one", "two"]
    said = capsys.readouterr().out
    assert "1  failed: the target's chat template refuses the conversation: not that" in said
    assert "1  skipped: the text is not valid Unicode" in said


def test_the_target_answers_in_this_process(tiny_target: str, write_chats: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ["regenerate", "--target", tiny_target, "--data", write_chats(5), "--out", str(out)]
    command += ["--max-new-tokens", "6", "--batch-size", "2", "--device", "cpu"]
    assert main(command) == 0
    rows = rows_of(out)
    assert [row["messages"][0]["content"] for row in rows] == [f"colour {i}" for i in range(5)]
    assert all(row["messages"][1]["role"] == "assistant" for row in rows)
    alone = tmp_path / "alone.jsonl"
    assert main([*command[:5], "--out", str(alone), *command[7:9], "--batch-size", "1", "--device", "cpu"]) == 0
    assert [r["messages"] for r in rows_of(alone)] == [r["messages"] for r in rows], "batching changes no answer"


def test_bad_options_are_named(tiny_target: str, write_chats: Callable[..., str], capsys) -> None:
    data = write_chats(2)
    assert main(["regenerate", "--target", tiny_target, "--data", data, "--out", data]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["regenerate", "--target", tiny_target, "--data", "no.jsonl", "--out", data + ".out"]) == 2
    assert "no.jsonl" in capsys.readouterr().err
    command = ["regenerate", "--target", tiny_target, "--data", data, "--out", data + ".out"]
    wrong = [("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "2"), ("--top-p", "0"), ("--dtype", "foo")]
    for option, value in [*wrong, ("--device", "cuda:9"), ("--device", "nowhere"), ("--batch-size", "0")]:
        assert main([*command, option, value]) == 2, option
        said = capsys.readouterr().err
        assert option.removeprefix("--") in said
        assert value in said
