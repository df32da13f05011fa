"""Byte-level tokenizers of GGUF files against ``tokenizers``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import AS_BYTES, DEFINITIONS, TEXTS, byte_level_values, load_gguf, train_byte_level, write_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from paceline.errors import CheckpointError, ParameterError, UnsupportedError
from paceline.text.byte_alphabet import byte_of_character
from paceline.text.gguf_tokenizer import tokenizer_from_metadata
from paceline.text.pretokenizers import PRETOKENIZERS
from paceline.text.special_tokens import end_token_ids
from paceline.text.tokenizer import Tokenizer
from paceline.weights.gguf import read_header
from paceline.weights.mapped_file import map_file


@pytest.fixture(scope="module", params=list(DEFINITIONS))
def byte_level_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Backend, Tokenizer]:
    """The library's tokenizer, and ours loaded from the GGUF file that was made of it."""
    backend = train_byte_level(request.param)
    path = tmp_path_factory.mktemp("tokenizer") / "t.gguf"
    return backend, load_gguf(write_gguf(path, byte_level_values(backend, request.param)))


def test_byte_alphabet_equals_the_library() -> None:
    assert set(byte_of_character()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of_character().values()) == list(range(256))
    for text in TEXTS:
        spelled = "".join(piece for piece, _ in AS_BYTES.pre_tokenize_str(text))
        assert bytes(byte_of_character()[character] for character in spelled) == text.encode()


def test_byte_level_equals_the_library(byte_level_pair: tuple[Backend, Tokenizer]) -> None:
    backend, tokenizer = byte_level_pair
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_equals_the_library_and_comes_back(byte_level_pair: tuple[Backend, Tokenizer], text: str) -> None:
    backend, tokenizer = byte_level_pair
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == normalized
    assert b"".join(tokenizer.token_bytes(i, include_special=True) for i in ids) == normalized.encode()


def test_cut_characters_decode_like_the_library(byte_level_pair: tuple[Backend, Tokenizer]) -> None:
    backend, tokenizer = byte_level_pair
    generator = random.Random(5)
    for _ in range(200):
        ids = [generator.randrange(backend.get_vocab_size()) for _ in range(6)]
        assert tokenizer.decode(ids) == backend.decode(ids)


def test_llama_bpe_takes_whole_words_before_merges(tmp_path: Path) -> None:
    backend = train_byte_level("llama-bpe")
    values = byte_level_values(backend, "llama-bpe")
    values["tokens"] = [*values["tokens"], "xqz"]  # no merge makes it
    values["token_type"].append(1)
    assert load_gguf(write_gguf(tmp_path / "a.gguf", values)).encode("xqz") == [len(values["tokens"]) - 1]
    del values["add_bos_token"]
    assert load_gguf(write_gguf(tmp_path / "b.gguf", values)).add_bos
    values["pre"] = "gpt-2"
    other = load_gguf(write_gguf(tmp_path / "c.gguf", values))
    assert len(other.encode("xqz")) == 3
    assert not other.add_bos


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_every_pretokenizer_loses_nothing(tmp_path: Path, pre: str) -> None:
    values = byte_level_values(train_byte_level("gpt-2"), pre)
    tokenizer = load_gguf(write_gguf(tmp_path / "t.gguf", values))
    for text in TEXTS:
        composed = normalizers.NFC().normalize_str(text) if pre == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == composed


def test_tekken_and_default_cut_as_they_should(tmp_path: Path) -> None:
    def pieces(pre: str, text: str) -> list[str]:
        backend, _ = tokenizer_from_metadata(tmp_path, metadata | {"tokenizer.ggml.pre": pre})
        return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    path = write_gguf(tmp_path / "t.gguf", byte_level_values(train_byte_level("gpt-2"), "gpt-2"))
    metadata = dict(read_header(path, map_file(path)).metadata)
    assert pieces("tekken", "camelCase HTTPServer 12/\n") == ["camel", "Case", " HTTPServer", " ", "1", "2", "/\n"]
    assert pieces("gpt-4o", "camelCase HTTPServer's 1234/\n") == [
        "camel",
        "Case",
        " HTTPServer's",
        " ",
        "123",
        "4",
        "/\n",
    ]
    assert pieces("default", "ab=c 12345") == ["ab", "=", "c", " ", "123", "45"]
    assert pieces("smollm", "ab 123") == ["ab", " ", "1", "2", "3"]
    assert pieces("llama-bpe", "it's 12345") == ["it", "'s", " ", "123", "45"]
    for pre in ("dbrx", "smaug-bpe"):  # OLMo 2 and Phi-4, SmolLM3
        assert pieces(pre, "it's 12345") == ["it", "'s", " ", "123", "45"]
    assert pieces("refact", "it's 123") == ["it", "'s", " ", "1", "2", "3"]  # Granite


def test_special_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    values = byte_level_values(train_byte_level("smollm"), "smollm")
    tokenizer = load_gguf(write_gguf(tmp_path / "t.gguf", values))
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, False)
    assert tokenizer.eos_token_ids == (2, 0)  # the declared one, then <|endoftext|>
    assert tokenizer.vocab_size == len(values["tokens"])
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.token_bytes(1, include_special=True) == b"<|im_start|>"
    assert tokenizer.token_bytes(10**5) == b""
    assert tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.decode([1, *tokenizer.encode("밥"), 2]) == "밥"
    values |= {"add_bos_token": True, "add_eos_token": True, "eot_token_id": 1}
    tokenizer = load_gguf(write_gguf(tmp_path / "u.gguf", values))
    assert tokenizer.add_bos
    assert tokenizer.eos_token_ids == (2, 1, 0)
    inner = tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.encode("a b") == [1, *inner, 2]


def test_a_harmony_message_ends_no_answer() -> None:
    """gpt-oss: an answer is several messages, and <|end|> stands between them."""
    ids = {"<|endoftext|>": 1, "<|end|>": 2, "<|return|>": 3, "<|call|>": 4}
    assert end_token_ids([3], ids.get) == (3, 1, 4)
    assert end_token_ids([2], {"<|end|>": 2, "<|return|>": 3}.get) == (2,)
    phi = {"<|endoftext|>": 1, "<|end|>": 2}
    assert end_token_ids([1], phi.get) == (1, 2)


def test_user_defined_tokens_are_found_and_are_text(tmp_path: Path) -> None:
    values = byte_level_values(train_byte_level("smollm"), "smollm")
    values["tokens"] = [*values["tokens"], "   ", "끝말"]
    values["token_type"] += [4, 4]
    tokenizer = load_gguf(write_gguf(tmp_path / "t.gguf", values))
    spaces, word = len(values["tokens"]) - 2, len(values["tokens"]) - 1
    ids = tokenizer.encode("a   b끝말")
    assert spaces in ids
    assert word in ids
    assert tokenizer.token_bytes(spaces) == b"   "
    assert tokenizer.decode(ids) == "a   b끝말"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre": "never-heard-of"}, UnsupportedError, "pre-tokenizer 'never-heard-of'; Paceline has default, gpt-2"),
        ({"pre": None}, UnsupportedError, "names no pre-tokenizer"),
        ({"model": "bert"}, UnsupportedError, "tokenizer 'bert'; Paceline has gpt2"),
        ({"tokens": None}, CheckpointError, "lacks tokenizer.ggml.tokens"),
        ({"merges": None}, CheckpointError, "lacks tokenizer.ggml.merges"),
        ({"merges": ["a b c"]}, CheckpointError, "not a pair"),
        ({"merges": ["a nonexistent"]}, CheckpointError, "does not fit the tokens"),
        ({"token_type": [1, 2]}, CheckpointError, "token_type must be a number for each"),
        ({"eos_token_id": 10**6}, CheckpointError, "tokenizer.ggml.eos_token_id is 1000000"),
        ({"token_type": 3}, CheckpointError, "tokenizer.ggml.token_type must be a number for each"),
        ({"tokens": [1, 2]}, CheckpointError, "lacks tokenizer.ggml.tokens"),
        ({"pre": [1, 2]}, UnsupportedError, "pre-tokenizer array"),
        ({"add_bos_token": [1, 2]}, CheckpointError, "tokenizer.ggml.add_bos_token is array"),
        ({"bos_token_id": True}, CheckpointError, "tokenizer.ggml.bos_token_id is True"),
        ({"model": "llama"}, CheckpointError, "tokenizer.ggml.scores must be a number for each"),
        ({"model": "llama", "scores": ["a"]}, CheckpointError, "tokenizer.ggml.scores must be a number for each"),
    ],
)
def test_tokenizers_that_cannot_be_loaded(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    values = byte_level_values(train_byte_level("gpt-2"), "gpt-2") | change
    path = write_gguf(tmp_path / "bad.gguf", {key: value for key, value in values.items() if value is not None})
    with pytest.raises(error) as caught:
        load_gguf(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", byte_level_values(train_byte_level("gpt-2"), "gpt-2"))
    with pytest.raises(ParameterError, match="lone surrogates"):
        load_gguf(path).encode("a\ud800b")
    with pytest.raises(ParameterError, match=r"ids below 4 and this text holds token"):
        load_gguf(path, num_embeddings=4).encode("hello")
