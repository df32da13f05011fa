"""SentencePiece tokenizers of GGUF files against a slow BPE."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import (
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

from paceline.text.gguf_tokenizer import merges_by_score


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
