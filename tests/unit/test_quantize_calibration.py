"""What tokens a quantisation is measured on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ParameterError
from paceline.quantize.calibration import read_calibration
from paceline.text.chat import ChatTemplate


class LetterTokenizer:
    """A token a character; 1 ends an answer."""

    eos_token_ids = (1,)
    add_bos = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if "\ud800" in text:
            raise ParameterError("prompt", text, "text without lone surrogates")
        return [2 + ord(letter) % 70 for letter in text]


TOKENIZER = LetterTokenizer()
TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", path="test")


def read(path: Path | None, template: ChatTemplate | None = None, **options: int) -> np.ndarray:
    return read_calibration(path, TOKENIZER, template, **options).tokens  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i * i % 26) for i in range(5000)))
    first = read(path, num_tokens=1000, sequence_tokens=50, seed=3)
    assert first.shape == (20, 50)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, read(path, num_tokens=1000, sequence_tokens=50, seed=3))
    assert not np.array_equal(first, read(path, num_tokens=1000, sequence_tokens=50, seed=4))


def test_a_short_text_is_used_whole(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ab" * 100)
    assert read(path, num_tokens=4096, sequence_tokens=512).shape == (1, 200)


def test_lines_of_text_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "u" * 80}, {"role": "assistant", "content": "a" * 80}]
    text = json.dumps({"text": "\u2028" + "t" * 80}, ensure_ascii=False)  # which ends a line for str.splitlines
    path.write_text(json.dumps({"messages": messages}) + "\n\n" + text + "\n", "utf-8")
    tokens = read(path, TEMPLATE).reshape(-1)
    assert (tokens == TOKENIZER.encode("u")[0]).sum() >= 80
    assert (tokens == TOKENIZER.encode("<")[0]).sum() == 2
    assert (tokens == TOKENIZER.encode("t")[0]).sum() >= 80


def test_the_built_in_text_is_there_for_models_with_and_without_a_template() -> None:
    for template in (TEMPLATE, None):
        tokens = read(None, template, num_tokens=8192)
        assert tokens.shape == (16, 512)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("missing.txt", None, "can be read"),
        ("text.txt", b"\xff\xfe abc", "UTF-8"),
        ("text.txt", b"short", "at least 128 tokens"),
        ("chat.jsonl", b"", "at least one line"),
        ("chat.jsonl", b'{"text": "a"}\nnot json\n', "line 2"),
        ("chat.jsonl", b'{"prompt": "a"}\n', "line 1"),
        ("chat.jsonl", b'["a"]\n', "line 1"),
        ("chat.jsonl", b'{"text": ["a"]}\n', "line 1"),
        ("chat.jsonl", b'{"text": "a"}\n{"messages": "hello"}\n', "line 2"),
        ("chat.jsonl", b"[" * 100_000, "line 1"),
        ("chat.jsonl", b'\n{"text": "\\ud800"}', "line 2.*lone surrogates"),
        ("chat.jsonl", b'{"messages": [{"role": "user", "content": "hi"}]}', "no chat template"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, name: str, data: bytes | None, match: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ParameterError, match=match):
        read(path)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "no role"}]])
def test_a_chat_that_the_template_refuses_is_named_by_its_line(tmp_path: Path, messages: list[object]) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"messages": messages}))
    with pytest.raises(ParameterError, match="line 2"):
        read(path, TEMPLATE)


def test_lines_end_at_line_feeds_only_and_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    line = json.dumps({"text": "one\u2028two\x85" * 20}, ensure_ascii=False) + "\r\n"
    (tmp_path / "plain.jsonl").write_bytes((line * 2).encode())
    (tmp_path / "MARKED.JSONL").write_bytes(("\ufeff" + line * 2).encode())
    tokens = read(tmp_path / "plain.jsonl")
    assert tokens.size == 2 * (8 * 20 + 1)
    np.testing.assert_array_equal(tokens, read(tmp_path / "MARKED.JSONL"))


def test_a_template_that_writes_the_date_gives_the_same_tokens_on_any_day(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "u" * 150}]}))
    dated = ChatTemplate("{{ strftime_now('%d %b %Y, %f') }}{{ messages[0].content }}", path="test")
    first = read(path, dated)
    assert first.size == len("01 Jan 2025, 000000") + 150
    np.testing.assert_array_equal(first, read(path, dated))


@pytest.mark.parametrize(("options", "field"), [({"seed": -1}, "seed=-1"), ({"num_tokens": 100}, "tokens=100")])
def test_numbers_that_cannot_be_are_refused(options: dict[str, int], field: str) -> None:
    with pytest.raises(ParameterError, match=field):
        read(None, TEMPLATE, **options)
