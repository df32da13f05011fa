"""Tokenizers of Hugging Face directories against ``tokenizers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import PIECES, TEXTS, reference_ids, sentencepiece_values, train_byte_level
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordPiece

from paceline.errors import CheckpointError, UnsupportedError
from paceline.text.backend import LibraryBackend
from paceline.text.gguf_tokenizer import merges_by_score
from paceline.text.huggingface_tokenizer import tokenizer_from_directory
from paceline.text.tokenizer import Tokenizer


def write_directory(directory: Path, backend: Backend, **files: dict[str, Any]) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def load_directory(directory: Path) -> Tokenizer:
    backend, special = tokenizer_from_directory(directory)
    return Tokenizer(LibraryBackend(backend), special, num_embeddings=10**6)


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


@pytest.mark.parametrize("ids", ["x", [["a"]], True, 1.5])
def test_end_tokens_that_are_no_ids_are_reported(tmp_path: Path, ids: Any) -> None:
    backend = Backend(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match="eos_token_id is"):
        load_directory(write_directory(tmp_path, backend, config={"eos_token_id": ids}))
