"""Tokenizers cross between tokenizer.json and GGUF metadata without changing an id, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from model_files import file_config, write_directory_model, write_gguf_model
from rounded_models import RoundedModel
from tokenizer_files import DEFINITIONS, PIECES, SPECIALS, TEXTS, sentencepiece_values, train_byte_level
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from paceline.errors import UnsupportedError
from paceline.quantize.export.gguf_vocabulary import PROBES, vocabulary_of
from paceline.quantize.export.tokenizer_files import write_tokenizer_files
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.text.gguf_tokenizer import tokenizer_from_metadata
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import GGUFCheckpoint


def directory(path: Path, backend: Backend, settings: dict[str, Any] | None = None, vocab_size: int = 0) -> Path:
    """A model whose tokenizer is ``backend``; its embedding has ``vocab_size`` rows when that is more."""
    config = file_config(vocab_size=max(vocab_size, backend.get_vocab_size()), num_layers=1)
    write_directory_model(path, config)
    backend.save(str(path / "tokenizer.json"))
    values = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(values if settings is None else settings))
    return path


@pytest.mark.parametrize("pre", DEFINITIONS)
def test_the_pretokenizer_is_found_by_what_it_does(tmp_path: Path, pre: str) -> None:
    backend = train_byte_level(pre)
    metadata = vocabulary_of(open_checkpoint(directory(tmp_path / "m", backend)))
    assert metadata["tokenizer.ggml.pre"] == pre
    written, special = tokenizer_from_metadata(tmp_path, metadata)
    for text in (*TEXTS, *PROBES):
        assert written.encode(text).ids == backend.encode(text).ids
    assert special.eos_ids[0] == backend.token_to_id("<|im_end|>")
    types = metadata["tokenizer.ggml.token_type"]
    assert [types[backend.token_to_id(token)] for token in SPECIALS] == [3, 3, 3]


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    backend = train_byte_level("smollm")
    backend.add_tokens([AddedToken("<think>", special=False)])
    count = backend.get_vocab_size()
    metadata = vocabulary_of(open_checkpoint(directory(tmp_path / "m", backend, vocab_size=count + 5)))
    assert len(metadata["tokenizer.ggml.tokens"]) == count + 5
    assert metadata["tokenizer.ggml.token_type"][count - 1 :].tolist() == [4, *[5] * 5]


def test_special_ids_and_surroundings(tmp_path: Path) -> None:
    backend = train_byte_level("llama-bpe")
    begin = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)])
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "pad_token": {"content": "<|im_end|>"}}
    path = directory(tmp_path / "m", backend, settings)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    metadata = vocabulary_of(open_checkpoint(path))
    found = {key: value for key, value in metadata.items() if key.endswith(("_id", "_bos_token", "_eos_token"))}
    assert found == {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }


def sentencepiece(tmp_path: Path) -> Backend:
    """A vocabulary of that kind as tokenizer.json holds it."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in sentencepiece_values(PIECES).items()}
    return tokenizer_from_metadata(tmp_path, metadata)[0]


def test_sentencepiece_merges_become_scores(tmp_path: Path) -> None:
    backend = sentencepiece(tmp_path)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    metadata = vocabulary_of(open_checkpoint(directory(tmp_path / "m", backend, settings)))
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.token_type"][:4].tolist() == [2, 3, 3, 6]
    written, special = tokenizer_from_metadata(tmp_path, metadata)
    for text in (*TEXTS, "the inn and the thin hand", "  a  "):
        assert written.encode(text).ids == backend.encode(text).ids
    assert (special.bos_id, special.eos_ids, special.prefix_ids) == (1, (2,), (1,))


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    odd = train_byte_level("smollm")
    odd.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[aeiou]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    lower = train_byte_level("smollm")
    lower.normalizer = normalizers.Lowercase()
    unigram = Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=False))
    spaced = train_byte_level("smollm")
    spaced.add_tokens([AddedToken("<sp>", special=True, lstrip=True, rstrip=True)])
    twice = train_byte_level("smollm")
    twice.post_processor = TemplateProcessing(
        single="<|im_start|> <|im_end|> $A", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    cases = {"odd": odd, "lower": lower, "unigram": unigram, "spaced": spaced, "twice": twice}
    messages = {
        "odd": "no pre-tokenizer of GGUF files",
        "lower": "no pre-tokenizer of GGUF files",
        "unigram": "of type Unigram",
        "spaced": "would cut",
        "twice": r"puts tokens \(1, 2\) before",
    }
    for name, backend in cases.items():
        settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        source = open_checkpoint(directory(tmp_path / name, backend, settings))
        with pytest.raises(UnsupportedError, match=messages[name]):
            write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m.gguf", "gguf")
        write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m", "compressed-tensors", force=True)
        assert (tmp_path / "m" / "tokenizer.json").read_bytes() == (tmp_path / name / "tokenizer.json").read_bytes()


def test_a_gguf_source_keeps_its_metadata(tmp_path: Path) -> None:
    source = open_checkpoint(write_gguf_model(tmp_path / "source.gguf", file_config()))
    assert isinstance(source, GGUFCheckpoint)
    write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m.gguf", "gguf")
    before, after = gguf.GGUFReader(tmp_path / "source.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    added = {"general.file_type", "general.quantization_version", "paceline.crc32"}
    assert {key for key in after.fields if not key.startswith("GGUF.")} == {
        key for key in before.fields if not key.startswith("GGUF.")
    } | added
    for key, field in before.fields.items():
        if not key.startswith("GGUF."):
            assert (after.fields[key].types, after.fields[key].contents()) == (field.types, field.contents()), key


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_gguf_vocabulary_becomes_files(tmp_path: Path, add_bos: bool) -> None:
    source = open_checkpoint(write_gguf_model(tmp_path / "source.gguf", file_config()))
    assert isinstance(source, GGUFCheckpoint)
    source.metadata = {
        **source.metadata,
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.ggml.add_eos_token": add_bos,
    }
    (tmp_path / "m").mkdir()
    write_tokenizer_files(source, tmp_path / "m")
    found = Backend.from_file(str(tmp_path / "m" / "tokenizer.json"))
    for text in TEXTS:
        assert found.encode(text).ids == load_tokenizer(source).encode(text)
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
