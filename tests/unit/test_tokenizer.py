"""Tokenizers of GGUF files and Hugging Face directories against ``tokenizers`` and against slow references."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordPiece

from paceline.errors import CheckpointError, ParameterError, UnsupportedError
from paceline.text.byte_alphabet import byte_of_character
from paceline.text.gguf_tokenizer import merges_by_score, tokenizer_from_metadata
from paceline.text.huggingface_tokenizer import tokenizer_from_directory
from paceline.text.pretokenizers import PRETOKENIZERS
from paceline.text.tokenizer import Tokenizer
from paceline.weights.gguf import read_header
from paceline.weights.mapped_file import map_file

TEXTS = [
    "",
    " ",
    "Hello world, it's 12345 o'clock! We'LL see.",
    "  two  spaces\n\n\ttabs \r\n end   ",
    "안녕하세요, 세계! 한국어 문장입니다.",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and é vs e\u0301, ﬁ, ½, Ⅷ, ٣",
    "def f(x):\n    return {'a': [1, 22, 333, 4444], \"b\": x**2}  # done\n\n\n",
    "中文字符 日本語テキスト русский текст",
    "\x00\x01 nul and \u200b zero width \ufeff",
    "<|im_start|>user\nhi<|im_end|>",
    "a<|im_end|> <|im_end|>b",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# The definitions in each family's tokenizer.json, written with the library's own parts where those have them.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
AS_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DEFINITIONS: dict[str, Any] = {
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), AS_BYTES]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_PATTERN.replace("{1,3}", "")), "isolated"), AS_BYTES]
    ),
    "deepseek-coder": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
            pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
            pre_tokenizers.Split(Regex(r"\s?\p{P}+"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            AS_BYTES,
        ]
    ),
}


def train_byte_level(pre: str) -> Backend:
    """A tiny byte-level BPE with that pre-tokenizer, trained on TEXTS."""
    backend = Backend(BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = DEFINITIONS[pre]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def write_gguf(path: Path, values: dict[str, Any]) -> Path:
    """A file with those keys under ``tokenizer.ggml.`` and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_values(backend: Backend, pre: str) -> dict[str, Any]:
    """What a converter writes for such a tokenizer."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }


def load_gguf(path: Path, num_embeddings: int = 10**6) -> Tokenizer:
    backend, special = tokenizer_from_metadata(path, read_header(path, map_file(path)).metadata)
    return Tokenizer(backend, special, num_embeddings=num_embeddings)


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
    assert pieces("default", "ab=c 12345") == ["ab", "=", "c", " ", "123", "45"]
    assert pieces("smollm", "ab 123") == ["ab", " ", "1", "2", "3"]
    assert pieces("llama-bpe", "it's 12345") == ["it", "'s", " ", "123", "45"]


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
        ({"token_type": [1, 2]}, CheckpointError, "2 token types"),
        ({"eos_token_id": 10**6}, CheckpointError, "tokenizer.ggml.eos_token_id is 1000000"),
        ({"model": "llama"}, CheckpointError, "lacks tokenizer.ggml.scores"),
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


# --- SentencePiece ---


def sentencepiece_bpe(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, slowly: merge the neighbours whose union scores best, the left of equals, until none do."""
    symbols = list(text)
    while True:
        candidates = [
            (-scores[symbols[i] + symbols[i + 1]], i)
            for i in range(len(symbols) - 1)
            if symbols[i] + symbols[i + 1] in scores
        ]
        if not candidates:
            return symbols
        _, i = min(candidates)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_values(pieces: list[str]) -> dict[str, Any]:
    """A vocabulary as a converter writes it: specials, bytes, pieces by falling score."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def reference_ids(text: str, pieces: list[str], *, prefix: bool = True) -> list[int]:
    """Ids by the slow reference; characters without a piece become their bytes."""
    ids = {piece: 259 + rank for rank, piece in enumerate(pieces)}
    if text and prefix:
        text = " " + text
    result: list[int] = []
    for symbol in sentencepiece_bpe(text.replace(" ", "▁"), {piece: -float(rank) for rank, piece in enumerate(pieces)}):
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result


WORDS = [
    "▁t",
    "he",
    "▁the",
    "in",
    "▁a",
    "er",
    "▁in",
    "on",
    "an",
    "re",
    "▁an",
    "and",
    "▁and",
    "th",
    "▁re",
    "가나",
    "▁가",
    "▁▁",
]
PIECES = WORDS + list("▁theinarodgf가나.,")


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


# --- Hugging Face directories ---


def write_directory(directory: Path, backend: Backend, **files: dict[str, Any]) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def load_directory(directory: Path) -> Tokenizer:
    backend, special = tokenizer_from_directory(directory)
    return Tokenizer(backend, special, num_embeddings=10**6)


def test_directory_equals_the_library(tmp_path: Path) -> None:
    backend = train_byte_level("smollm")
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    tokenizer = load_directory(write_directory(tmp_path, backend, tokenizer_config=config))
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)
        assert b"".join(tokenizer.token_bytes(i, include_special=True) for i in ids) == text.encode()
    assert tokenizer.bos_token_id == 1
    assert not tokenizer.add_bos
    assert tokenizer.eos_token_ids == (2, 0)


def test_end_tokens_come_from_every_file(tmp_path: Path) -> None:
    backend = train_byte_level("smollm")
    backend.add_special_tokens(["<|eot_id|>", "</s>"])
    eot, end = backend.token_to_id("<|eot_id|>"), backend.token_to_id("</s>")
    tokenizer = load_directory(
        write_directory(
            tmp_path,
            backend,
            generation_config={"eos_token_id": [end, 1]},
            config={"eos_token_id": 77},
            tokenizer_config={"eos_token": "<|im_end|>"},
        )
    )
    assert tokenizer.eos_token_ids == (end, 1, 2, eot, 0)
    (tmp_path / "generation_config.json").unlink()
    assert load_directory(tmp_path).eos_token_ids == (77, 2, eot, 0)


def test_post_processor_and_its_override(tmp_path: Path) -> None:
    backend = train_byte_level("smollm")
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    config = {"bos_token": "<|im_start|>"}
    tokenizer = load_directory(write_directory(tmp_path, backend, tokenizer_config=config))
    backend.no_truncation()
    backend.no_padding()
    text = TEXTS[2]
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.add_bos
    write_directory(tmp_path, backend, tokenizer_config=config | {"add_bos_token": False})
    assert load_directory(tmp_path).encode(text) == backend.encode(text).ids[1:]


@pytest.mark.parametrize("style", ["normalizer", "metaspace"])
def test_sentencepiece_directory(tmp_path: Path, style: str) -> None:
    values = sentencepiece_values(PIECES)
    ids = {token: i for i, token in enumerate(values["tokens"])}
    merges = merges_by_score(ids, values["scores"])
    backend = Backend(BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    undo: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if style == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *undo, decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
        backend.decoder = decoders.Sequence([*undo, decoders.Metaspace("▁", prepend_scheme="always")])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer = load_directory(write_directory(tmp_path, backend))
    for text in ("the and", "가나 다라 🙂", "in  there"):
        assert tokenizer.encode(text) == backend.encode(text).ids == reference_ids(text, PIECES)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == (" " + text).encode()


def test_directories_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        load_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        load_directory(tmp_path)
    backend = Backend(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="decoder is WordPiece"):
        load_directory(write_directory(tmp_path, backend))
