"""Damaged files: whatever is wrong with a file, opening it says so and never fails in another way."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, ModelError, UnsupportedError
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import read_header
from paceline.weights.mapped_file import map_file
from paceline.weights.safetensors_header import read_entries


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with all sorts of values and two tensors; not a whole model."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_string("name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "디"])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0])
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def parse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    read_header(path, map_file(path))


def test_every_truncation_is_reported(tmp_path: Path, tiny_gguf: bytes) -> None:
    path = tmp_path / "cut.gguf"
    parse(path, tiny_gguf)
    for length in range(len(tiny_gguf)):
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            parse(path, tiny_gguf[:length])


def test_truncated_data_names_the_tensor(tmp_path: Path, tiny_gguf: bytes) -> None:
    with pytest.raises(CheckpointError, match="truncated") as caught:
        parse(tmp_path / "cut.gguf", tiny_gguf[:-1])
    assert caught.value.tensor == "output_norm.weight"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupt_header_is_reported_or_harmless(tmp_path: Path, tiny_gguf: bytes, data: st.DataObject) -> None:
    content = bytearray(tiny_gguf)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 640 - 1))] = data.draw(st.integers(0, 255))
    message = "corrupt.gguf"
    try:
        parse(tmp_path / "corrupt.gguf", bytes(content))
    except ModelError as error:
        message = str(error)
    assert "corrupt.gguf" in message


@pytest.mark.parametrize(
    ("at", "patch", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1; Paceline reads 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "announces 1,152,921,504,606,846,976 tensors"),
        (16, struct.pack("<Q", 2**63), "metadata values, more than the file can hold"),
        (24, struct.pack("<Q", 2**64 - 1), "truncated or corrupt at byte 24"),
    ],
)
def test_bad_beginnings(tmp_path: Path, tiny_gguf: bytes, at: int, patch: bytes, message: str) -> None:
    content = tiny_gguf[:at] + patch + tiny_gguf[at + len(patch) :]
    with pytest.raises(CheckpointError, match=message):
        parse(tmp_path / "bad.gguf", content)


def test_absurd_array_count(tmp_path: Path, tiny_gguf: bytes) -> None:
    key = tiny_gguf.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    content = tiny_gguf[: key + 8] + struct.pack("<Q", 2**40) + tiny_gguf[key + 16 :]
    with pytest.raises(CheckpointError, match="strings, more than the file can hold"):
        parse(tmp_path / "bad.gguf", content)


@pytest.mark.parametrize("name", [b"name", b"output_norm.weight"])
def test_duplicates(tmp_path: Path, tiny_gguf: bytes, name: bytes) -> None:
    other = {b"name": b"llama.block_count", b"output_norm.weight": b"token_embd.weight"}[name]
    prefixed = struct.pack("<Q", len(name)) + name
    content = tiny_gguf.replace(prefixed, struct.pack("<Q", len(other)) + other)
    with pytest.raises(CheckpointError, match="twice"):
        parse(tmp_path / "bad.gguf", content)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(tmp_path / "absent")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(CheckpointError, match="empty"):
        open_checkpoint(empty)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(CheckpointError, match="neither a GGUF file nor a directory"):
        open_checkpoint(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_sound_safetensors_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(safetensors_bytes({"__metadata__": {"format": "pt"}, "t": entry()}, b"\0" * 8))
    assert list(read_entries(path, map_file(path))) == ["t"]


@pytest.mark.parametrize(
    ("content", "message", "tensor"),
    [
        (lambda: b"\x10", "truncated", None),
        (lambda: struct.pack("<Q", 2**40) + b"{}", "header of 1,099,511,627,776 bytes", None),
        (lambda: safetensors_bytes(b"{..."), "header is corrupt", None),
        (lambda: safetensors_bytes(b"\xff\xfe{}"), "header is corrupt", None),
        (lambda: safetensors_bytes([1]), "not a JSON object", None),
        (lambda: safetensors_bytes({"t": entry()}, b"\0" * 7), "ends at byte", "t"),
        (lambda: safetensors_bytes({"t": entry(shape=(3,))}, b"\0" * 8), "is F32 (3,) but has 8 bytes", "t"),
        (lambda: safetensors_bytes({"t": entry(offsets=(8, 0))}, b"\0" * 8), "corrupt", "t"),
        (lambda: safetensors_bytes({"t": entry(shape=(-2,))}, b"\0" * 8), "corrupt", "t"),
        (lambda: safetensors_bytes({"t": entry(shape="ab")}, b"\0" * 8), "corrupt", "t"),
        (lambda: safetensors_bytes({"t": entry(offsets=(0,))}, b"\0" * 8), "corrupt", "t"),
        (lambda: safetensors_bytes({"t": 5}, b"\0" * 8), "corrupt", "t"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, content: Callable[[], bytes], message: str, tensor: str | None) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content())
    with pytest.raises(CheckpointError) as caught:
        read_entries(path, map_file(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.tensor == tensor


def test_unknown_class_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="'MambaForCausalLM'; Paceline runs LlamaForCausalLM, Mistral"):
        open_checkpoint(tmp_path)
