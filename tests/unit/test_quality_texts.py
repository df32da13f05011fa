"""Texts and conversations: what is read, which tokens are scored, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ParameterError
from paceline.measure.quality.texts import (
    BUILT_IN,
    WindowShape,
    chat_tokens,
    chat_windows,
    read_conversations,
    read_text,
    text_windows,
)

END, BOS = 1, 2


class ByteTokenizer:
    """A token a byte; ``<e>`` is the end of a turn."""

    def __init__(self, *, add_bos: bool = False) -> None:
        self.add_bos = add_bos
        self.bos_token_id = BOS
        self.eos_token_ids = (END,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens, "windows put BOS where it belongs"
        pieces = re.split("(<e>)", text)
        return [token for piece in pieces for token in ([END] if piece == "<e>" else [*piece.encode()])]


class Template:
    """``u:hello<e>|a:hi<e>|``; ``rewrites`` drops what the assistant said before the last turn."""

    def __init__(self, *, rewrites: bool = False) -> None:
        self.rewrites = rewrites

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
        kept = [m for m in messages[:-1] if not self.rewrites or m["role"] != "assistant"] + [*messages[-1:]]
        text = "".join(f"{message['role'][0]}:{message['content']}<e>|" for message in kept)
        return text + ("a:" if add_generation_prompt else "")


TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "never seen"},
]


def test_scored_is_what_the_assistant_says_and_its_end() -> None:
    tokens, scored = chat_tokens(TURNS, ByteTokenizer(), Template())
    spoken = "".join("<e>" if token == END else chr(token) for token in tokens)
    assert spoken == "u:hello<e>|a:hi<e>|u:more<e>|a:no<e>|"
    heard = [token for token, is_scored in zip(tokens, scored, strict=True) if is_scored]
    assert heard == [*b"hi", END, *b"no", END]


def test_conversations_slide_and_are_cut_by_scored_tokens() -> None:
    shape = WindowShape(context=8)
    windows = chat_windows([TURNS, TURNS], ByteTokenizer(), Template(), shape)
    assert sum(len(window.targets) for window in windows) == 12
    assert all(len(window.tokens) <= 8 for window in windows)
    windows = chat_windows([TURNS, TURNS], ByteTokenizer(), Template(), shape, num_tokens=7)
    assert sum(len(window.targets) for window in windows) == 7
    assert windows[-1].tokens[windows[-1].targets[-1]] == ord("h")


def test_bos_begins_every_window_of_a_text() -> None:
    windows = text_windows("abcdefgh", ByteTokenizer(add_bos=True), WindowShape(context=5), field="text")
    assert all(window.tokens[0] == BOS for window in windows)
    assert sum(len(window.targets) for window in windows) == 8
    chunks = text_windows("abcdefgh", ByteTokenizer(add_bos=True), WindowShape("chunks", 4), field="text")
    assert [window.tokens.tolist() for window in chunks] == [[BOS, *b"abc"], [BOS, *b"efg"]]
    plain = text_windows("abcdefgh", ByteTokenizer(), WindowShape(context=5), field="text", num_tokens=6)
    assert sum(len(window.targets) for window in plain) == 5


def test_built_in_text_is_there() -> None:
    assert len(read_text(BUILT_IN)) > 10_000


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "not empty"), (b" \n", "not empty"), (b"abc\xff", "byte 3"), (None, "No such file")],
)
def test_unreadable_texts_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ParameterError, match=words):
        read_text(path)


def test_ends_of_lines_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\r\ntwo\n")
    assert read_text(path) == "one\r\ntwo\n"


def test_conversations_are_read_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    odd = [{"role": "user", "content": "a\u2028b\x85c"}, TURNS[1]]
    lines = [json.dumps(TURNS) + "\r", "", json.dumps({"messages": odd, "id": 3}, ensure_ascii=False), ""]
    path.write_text("\n".join(lines), "utf-8-sig")
    assert read_conversations(path) == [TURNS, odd]


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '"text"', '[{"content": "x"}]', "[1]"])
def test_damaged_conversations_are_refused_by_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(TURNS) + "\n" + line + "\n")
    with pytest.raises(ParameterError, match="line 2"):
        read_conversations(path)


def test_messages_that_a_template_refuses_are_told_by_conversation() -> None:
    class Refusing(Template):
        def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
            if any("content" not in message for message in messages):
                raise ParameterError("messages", "user", "the chat template says: no content")
            return super().render(messages, add_generation_prompt)

    odd = [{"role": "user"}, TURNS[1]]
    with pytest.raises(ParameterError, match=r"chat='conversation 2' .*the chat template says: no content"):
        chat_windows([TURNS, odd], ByteTokenizer(), Refusing(), WindowShape())


def test_what_cannot_be_scored_is_refused() -> None:
    shape = WindowShape()
    with pytest.raises(ParameterError, match="two tokens"):
        text_windows("a", ByteTokenizer(), shape, field="text")
    with pytest.raises(ParameterError, match="messages of the assistant"):
        chat_windows([TURNS[:1]], ByteTokenizer(), Template(), shape)
    with pytest.raises(ParameterError, match=r"conversation 1.*rewrites"):
        chat_windows([TURNS], ByteTokenizer(), Template(rewrites=True), shape)
    with pytest.raises(ParameterError, match="sliding"):
        chat_windows([TURNS], ByteTokenizer(), Template(), WindowShape("chunks"))
    with pytest.raises(ParameterError, match="sliding windows only"):
        WindowShape("chunks", 512, 256)
    with pytest.raises(ParameterError, match="sliding or chunks"):
        WindowShape("rolling")
