"""Tiny tokenizers, trained or listed here, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from paceline.text.gguf_tokenizer import backend_from_metadata
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
    backend, special = backend_from_metadata(path, read_header(path, map_file(path)).metadata)
    return Tokenizer(backend, special, num_embeddings=num_embeddings)


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
