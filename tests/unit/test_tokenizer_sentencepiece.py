"""SentencePiece tokenizers of GGUF files against a slow BPE."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import (
    BYTE_TOKENS,
    PIECES,
    TEXTS,
    load_gguf,
    reference_ids,
    sentencepiece_bpe,
    sentencepiece_values,
    write_gguf,
)
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from paceline.errors import CheckpointError, ParameterError
from paceline.text.backend import LibraryBackend
from paceline.text.gguf_tokenizer import backend_from_metadata, merges_by_score, tokenizer_from_metadata
from paceline.text.sentencepiece import SentencePiece


def test_sentencepiece_equals_the_slow_reference(tmp_path: Path) -> None:
    tokenizer = load_gguf(write_gguf(tmp_path / "s.gguf", sentencepiece_values(PIECES)))
    for text in [
        "",
        "the and",
        "  the   end. ",
        "another thing in there",
        "가나 가나 다라",
        "🙂 ok\n\tx",
        "ininther",
        *TEXTS,
    ]:
        if "<|" in text:
            continue
        expected = reference_ids(text, PIECES)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert b"".join(map(tokenizer.token_bytes, expected)) == ((" " + text) if text else "").encode()
    assert tokenizer.add_bos
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    joined=st.lists(st.text(alphabet="abc▁", min_size=2, max_size=4), unique=True, max_size=12),
    seed=st.integers(0, 2**16),
)
def test_random_vocabularies_equal_the_slow_reference(data: st.DataObject, joined: list[str], seed: int) -> None:
    # No periodic pieces: where two splits of one piece overlap, a merge list cannot follow (see merges_by_score).
    joined = [piece for piece in joined if not any(piece.startswith(piece[cut:]) for cut in range(1, len(piece)))]
    random.Random(seed).shuffle(joined)
    pieces = joined + list("abc▁")
    ids = {piece: i for i, piece in enumerate(pieces)}
    scores = [-float(rank) for rank in range(len(pieces))]
    backend = Backend(BPE(vocab=ids, merges=merges_by_score(ids, scores)))
    text = data.draw(st.text(alphabet="abc▁", max_size=24))
    expected = sentencepiece_bpe(text, dict(zip(pieces, scores, strict=True)))
    assert [backend.id_to_token(i) for i in backend.encode(text).ids] == expected
    quick = SentencePiece(ids, scores, added={}, unknown_id=None, add_space_prefix=False)
    assert [pieces[i] for i in quick.ids(text)] == expected


@settings(max_examples=300, deadline=None)
@given(
    joined=st.lists(st.text(alphabet="ab▁>", min_size=2, max_size=5), unique=True, max_size=16),
    user_defined=st.lists(st.sampled_from(["  ", "   ", "    ", "\n", "\n\n", "<t>", "<t>a", "a>b"]), unique=True),
    single=st.sets(st.sampled_from("ab▁>\n")),
    num_bytes=st.sampled_from([0, 256]),
    prefix=st.booleans(),
    architecture=st.sampled_from(["llama", "phi3"]),
    texts=st.lists(st.text(alphabet="ab ▁>\n<té가", max_size=24), min_size=1, max_size=6),
)
def test_quick_form_equals_the_library(
    joined: list[str],
    user_defined: list[str],
    single: set[str],
    num_bytes: int,
    prefix: bool,
    architecture: str,
    texts: list[str],
) -> None:
    """Every vocabulary: runs of spaces, pieces across words, periodic ones, characters and bytes without a piece."""
    spaces = {"▁" * len(text) for text in user_defined if not text.strip(" ")}
    pieces = list(dict.fromkeys([*joined, *sorted(single)]))
    pieces = [piece for piece in pieces if piece not in {*user_defined, *spaces}]
    tokens = ["<unk>", "<s>", *BYTE_TOKENS[:num_bytes], *user_defined, *pieces]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, *[6] * num_bytes, *[4] * len(user_defined), *[1] * len(pieces)],
        "scores": [*[-1000.0] * (2 + num_bytes + len(user_defined)), *(-float(i) for i in range(len(pieces)))],
        "bos_token_id": 1,
        "eos_token_id": 1,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = architecture
    quick, _ = backend_from_metadata(Path("t.gguf"), metadata)
    library, _ = tokenizer_from_metadata(Path("t.gguf"), metadata)
    assert isinstance(quick, SentencePiece)
    for text in texts:
        for _ in range(2):  # computed, then remembered
            assert quick.ids(text) == library.encode(text).ids, text
    of_library = LibraryBackend(library)
    assert quick.added == of_library.added
    assert [quick.token(i) for i in range(len(tokens) + 1)] == [of_library.token(i) for i in range(len(tokens) + 1)]
    assert (quick.num_tokens, quick.strips_first_space) == (of_library.num_tokens, of_library.strips_first_space)


def test_phi_3_drops_white_space_after_its_turns() -> None:
    """Its template has a line end after each of them, and none was there in training."""
    values = sentencepiece_values([*PIECES, "<|user|>", "<|end|>"])
    values["token_type"][-2:] = [3, 4]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    texts = ("<|user|>\n the<|end|> \n <|user|>", "<|user|>the<|end|><|user|>", "<s>\n the")

    def ids(architecture: str) -> list[list[int]]:
        backend, _ = backend_from_metadata(Path("t.gguf"), metadata | {"general.architecture": architecture})
        return [backend.ids(text) for text in texts]

    with_lines, without, after_begin = ids("phi3")
    assert with_lines == without
    assert without[0] == len(values["tokens"]) - 2
    plain_with_lines, plain_without, plain_after_begin = ids("llama")
    assert plain_with_lines != plain_without == without
    assert after_begin == plain_after_begin


def test_runs_of_spaces_are_found_however_the_file_spells_them(tmp_path: Path) -> None:
    """A converter writes user-defined runs as spaces; they are merged, cut and decoded as the vocabulary's own."""
    pieces = [piece for piece in PIECES if piece != "▁▁"]
    values = sentencepiece_values(pieces) | {"add_space_prefix": False, "add_bos_token": False}
    first = len(values["tokens"])
    values["tokens"] = [*values["tokens"], "  ", "   ", "\n\n", "     "]
    values["token_type"] = [*values["token_type"], 4, 4, 4, 4]
    values["scores"] = [*values["scores"], *[-1000.0] * 4]
    two, three, lines, five = range(first, first + 4)
    tokenizer = load_gguf(write_gguf(tmp_path / "s.gguf", values))
    the = reference_ids("the", pieces, prefix=False)
    assert tokenizer.encode("   the  ") == [three, *the, two]
    assert tokenizer.encode("▁▁▁the") == [three, *the]
    assert tokenizer.encode("       the\n\n") == [five, two, *the, lines]  # four are no token: five cannot be merged
    assert [tokenizer.token_bytes(i) for i in (two, three, five)] == [b"  ", b"   ", b"     "]
    assert tokenizer.decode([three, *the, lines]) == "   the\n\n"


def test_long_words_and_lone_surrogates(tmp_path: Path) -> None:
    tokenizer = load_gguf(write_gguf(tmp_path / "s.gguf", sentencepiece_values(PIECES)))
    for text in ("an" * 200, "the" * 11, "▁" * 70):
        assert tokenizer.encode(text, add_special_tokens=False) == reference_ids(text, PIECES)
    with pytest.raises(ParameterError, match="lone surrogates"):
        tokenizer.encode("the \ud800")


def test_a_token_spelled_twice_is_an_error(tmp_path: Path) -> None:
    values = sentencepiece_values([*PIECES, "in"])
    with pytest.raises(CheckpointError, match="the same token twice"):
        load_gguf(write_gguf(tmp_path / "s.gguf", values))


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    values = sentencepiece_values(PIECES) | {"add_space_prefix": False, "add_bos_token": False}
    tokenizer = load_gguf(write_gguf(tmp_path / "s.gguf", values))
    assert tokenizer.encode("the end") == reference_ids("the end", PIECES, prefix=False)
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_sentencepiece_specials_in_text(tmp_path: Path) -> None:
    tokenizer = load_gguf(write_gguf(tmp_path / "s.gguf", sentencepiece_values(PIECES)))
    ids = tokenizer.encode("the</s>and", add_special_tokens=False)
    assert ids == [*reference_ids("the", PIECES), 2, *reference_ids("and", PIECES)]
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(2, include_special=True) == b"</s>"
    assert tokenizer.token_bytes(3 + 0xEA) == b"\xea"
