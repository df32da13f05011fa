"""Pieces of text against the whole text, cut by a slow definition of stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.detokenize import Detokenizer, StopMatcher, Utf8Decoder, missing_bytes

TEXTS = "한국어 ☕ e\u0301 👩\u200d👧 naïve\n"


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The definition: character by character; at the first one that ends stop strings, the longest is cut off."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))]
    return text


def byte_table(pieces: Sequence[bytes]) -> dict[int, bytes]:
    return dict(enumerate(pieces))


@given(st.lists(st.binary(max_size=5)))
def test_pieces_decode_like_the_whole(pieces: list[bytes]) -> None:
    decoder = Utf8Decoder()
    text = "".join(decoder.feed(piece) for piece in pieces) + decoder.flush()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(), st.data())
def test_no_character_is_ever_split(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    decoder = Utf8Decoder()
    done = ""
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        done += decoder.feed(raw[start:end])
        assert text.startswith(done)
        assert len(raw[:end]) - len(done.encode()) < 4
    assert done == text


@given(st.text(st.sampled_from("ab한☕")), st.integers(0, 40))
def test_a_character_that_began_in_the_prompt_is_no_part_of_the_answer(text: str, cut: int) -> None:
    raw = text.encode()
    cut = min(cut, len(raw))
    prompt, answer = raw[:cut], raw[cut:]
    pieces = [bytes([byte]) for byte in raw]
    token_bytes = byte_table([*pieces, b""])
    detokenizer = Detokenizer(token_bytes, list(range(len(prompt))), ())
    for token in range(len(prompt), len(raw)):
        detokenizer.feed(token)
    detokenizer.finish()
    whole = len(prompt.decode("utf-8", "ignore"))
    started = len(prompt.decode("utf-8", "ignore").encode()) < len(prompt)
    assert detokenizer.text == text[whole + started :]
    assert answer.decode("utf-8", "ignore") == detokenizer.text


@pytest.mark.parametrize(
    ("tail", "missing"),
    [
        (b"", 0),
        (b"abc", 0),
        ("é".encode(), 0),
        ("é".encode()[:1], 1),
        ("☕".encode()[:1], 2),
        ("☕".encode()[:2], 1),
        ("👩".encode()[:1], 3),
        ("👩".encode()[:3], 1),
        (b"\x80\x80\x80", 0),
        (b"\xff", 0),
        (b"a\x80", 0),
    ],
)
def test_missing_bytes(tail: bytes, missing: int) -> None:
    assert missing_bytes(tail) == missing


def test_other_bytes_than_the_missing_ones_are_kept() -> None:
    decoder = Utf8Decoder(missing=2)
    assert decoder.feed("☕".encode()[1:2]) == ""
    assert decoder.feed(b"") == ""
    assert decoder.feed(b"x\x80") + decoder.flush() == "x\ufffd"


ALPHABET = st.text(st.sampled_from("abc"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=3)


@given(st.lists(st.text(st.sampled_from("abc"), max_size=6)), STOPS)
def test_the_matcher_cuts_where_the_definition_does(pieces: list[str], stops: list[str]) -> None:
    final = cut_at_stop("".join(pieces), stops)
    matcher = StopMatcher(stops)
    shown = seen = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        seen += piece
        assert final.startswith(shown), "part of a stop string was shown"
        if not matcher.stopped:
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops), "held for no reason"
    assert matcher.stopped == (final != "".join(pieces))
    assert shown + matcher.flush() == final


@given(
    st.lists(st.sampled_from([bytes([byte]) for byte in set(TEXTS.encode())]), min_size=1, max_size=60),
    st.lists(st.text(st.sampled_from(TEXTS), min_size=1, max_size=3), max_size=3),
    st.data(),
)
def test_streamed_pieces_join_to_the_final_text_and_know_who_made_each_character(
    tokens: list[bytes], stops: list[str], data: st.DataObject
) -> None:
    token_bytes = byte_table(tokens)
    drafted = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    detokenizer, decoder = Detokenizer(token_bytes, [], stops), Utf8Decoder()
    pieces: list[tuple[str, bool]] = []
    makers: list[bool] = []  # of each character
    for token, is_drafted in enumerate(drafted):
        makers += [is_drafted] * len(decoder.feed(tokens[token]))
        detokenizer.feed(token, drafted=is_drafted)
        if data.draw(st.booleans()):
            pieces += detokenizer.take()
        if detokenizer.stopped:
            break
    makers += [drafted[-1]] * len(decoder.flush())
    detokenizer.finish()
    pieces += detokenizer.take()
    text = "".join(piece for piece, _ in pieces)
    assert text == detokenizer.text == cut_at_stop(b"".join(tokens).decode("utf-8", "replace"), stops)
    assert [maker for piece, maker in pieces for _ in piece] == makers[: len(text)]
    assert detokenizer.take() == ()


def test_pieces_are_as_few_as_tell_the_same() -> None:
    detokenizer = Detokenizer(byte_table([b"a", b"bS", b"T"]), [], ["STOP"])
    for token, drafted in ((0, False), (0, False), (0, True), (1, True), (2, False)):
        detokenizer.feed(token, drafted=drafted)
    assert detokenizer.take() == (("aa", False), ("ab", True)), "what may become a stop string is held"
    detokenizer.finish()
    assert detokenizer.take() == (("S", True), ("T", False)), "and keeps who made it"


def test_the_longest_of_stop_strings_that_end_together_is_cut() -> None:
    matcher = StopMatcher(["b", "ab", "xb"])
    assert matcher.feed("ca") == "c"
    assert matcher.feed("b") == ""
    assert matcher.stopped


def test_text_before_the_minimum_is_not_searched() -> None:
    token_bytes = byte_table([b"ST", b"OP", b""])
    detokenizer = Detokenizer(token_bytes, [], ["STOP"])
    for token, may_stop in ((0, False), (1, True), (0, True)):
        detokenizer.feed(token, may_stop=may_stop)
    assert not detokenizer.stopped
    detokenizer.feed(1)
    assert detokenizer.stopped
    assert detokenizer.text == "STOP"
