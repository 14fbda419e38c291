"""`dflash generate --chat` on piped input, and what it shows while an answer is decoded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dflash_lightning.chat import Chat
from dflash_lightning.cli import main
from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import SamplingOptions
from dflash_lightning.speculative import SpeculativeDecoder
from tests.test_generate import make_drafter, save


@pytest.fixture
def chat(tiny_target: str) -> Chat:
    drafter = make_drafter(tiny_target)
    decoder = SpeculativeDecoder(tiny_target, target_layer_ids(drafter.config))
    return Chat(decoder, drafter, SamplingOptions(12, stop_ids=decoder.stop_ids), "be brief")


def answer_of(chat: Chat, messages: list[dict]) -> str:
    ids = chat.decoder.encode(messages)
    out = chat.decoder.decode(chat.drafter, ids, chat.options)
    return chat.decoder.tokenizer.decode(out.tokens, skip_special_tokens=True)


def test_turns_are_the_targets_own_answers_to_the_whole_history(chat: Chat) -> None:
    history = [{"role": "system", "content": "be brief"}]
    for text in ("red", "and green"):
        pieces: list[str] = []
        out = chat.answer(text, pieces.append)
        assert out is not None
        assert 1 <= len(out.tokens) <= 12
        history.append({"role": "user", "content": text})
        history.append({"role": "assistant", "content": answer_of(chat, history)})
        assert "".join(pieces) == history[-1]["content"]
        assert chat.messages == history
    chat.reset()
    assert chat.messages == history[:1]


def test_pieces_come_as_they_are_verified(chat: Chat, monkeypatch) -> None:
    """An unfinished character is held back; at the end whatever is there is shown."""
    euro = chat.decoder.tokenizer("€", add_special_tokens=False)["input_ids"]
    assert len(euro) == 3
    letter = chat.decoder.tokenizer("a", add_special_tokens=False)["input_ids"]
    seen: list[list[str]] = []

    def decode(drafter, ids, options, *, on_tokens, **more):
        pieces = []
        for tokens in (letter, euro[:1], euro[1:], [*letter, euro[0]]):
            on_tokens(tokens)
            seen.append(list(shown))
        return pieces

    shown: list[str] = []
    monkeypatch.setattr(chat.decoder, "decode", decode)
    chat.answer("red", shown.append)
    assert seen == [["a"], ["a"], ["a", "€"], ["a", "€", "a"]]
    assert "".join(shown) == "a€a\N{REPLACEMENT CHARACTER}"


def test_an_answer_cut_short_stays_in_the_history(chat: Chat, monkeypatch) -> None:
    def decode(drafter, ids, options, *, on_tokens, **more):
        on_tokens(chat.decoder.tokenizer("ab", add_special_tokens=False)["input_ids"])
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.decoder, "decode", decode)
    assert chat.answer("red", lambda _: None) is None
    assert chat.messages[-1] == {"role": "assistant", "content": "ab"}


def test_the_tool_reads_lines(tiny_target: str, tmp_path: Path, capsys, monkeypatch) -> None:
    folder = save(make_drafter(tiny_target), tmp_path / "drafter")
    command = ["generate", "--target", tiny_target, "--drafter", folder, "--device", "cpu", "--chat"]
    command += ["--max-new-tokens", "6", "--system", "be brief"]

    def talk(lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(command) == 0
        return capsys.readouterr().out

    once = talk("red\n")
    assert once.count("[tau ") == 1
    assert "tokens/s, 6 tokens]" in once
    twice = talk("red\n\n/reset\nred\n/quit\nnever read\n")
    assert twice.count("[tau ") == 2
    first, second = (part.rpartition("[tau ")[0].strip() for part in twice.split("[forgotten]"))
    assert first == second, "a forgotten conversation begins anew"
    assert "no command /what" in talk("/what is this\n")
    for wrong in (["--prompt", "red"], ["--compare", "x"], ["--json"]):
        assert main([*command, *wrong]) == 2
        assert f"--chat: goes without {wrong[0]}" in capsys.readouterr().err
    assert main([c for c in command if c != "--chat"] + ["--prompt", "red"]) == 2
    assert "--system: only with --chat" in capsys.readouterr().err
