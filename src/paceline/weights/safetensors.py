"""Hugging Face directories: config.json and safetensors, read without a copy.

Source: the safetensors format (huggingface/safetensors, README).
Departures: the library hands out numpy arrays, and numpy has no bfloat16; this reader hands out bytes.
Checked by: tests/unit/test_safetensors.py, against the library.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.huggingface_config import config_from_json
from paceline.weights.inventory import Shape, check_inventory
from paceline.weights.mapped_file import map_file
from paceline.weights.raw import BLOCK_KINDS, RawTensor

DTYPES = ("F32", "F16", "BF16")

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BLOCK_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
"""Buffers that old versions of Transformers saved; they follow from the configuration."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: bytes ``start : start + num_bytes`` of ``file``."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    num_bytes: int


class HuggingFaceCheckpoint:
    """A directory with config.json and safetensors, memory-mapped; implements ``raw.Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """Reads config.json and all headers. Raises CheckpointError or UnsupportedError, naming file and tensor."""
        self._path = path
        self.interleaved_rope = False
        self.config = config_from_json(path / "config.json", read_json(path / "config.json"))
        files = _weight_files(path)
        self._buffers = {file: map_file(file) for file in files}
        self._tensors: dict[str, Entry] = {}
        for file, buffer in self._buffers.items():
            for name, entry in read_entries(file, buffer).items():
                self._add(canonical_name(name), entry)
        check_inventory(path, self.config, {name: entry.shape for name, entry in self._tensors.items()})

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that the model is made of, for ``model_hash``: the tokenizer's files change no key and no value."""
        return (self._path / "config.json", *self._buffers)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def tensor(self, name: str) -> RawTensor:
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(self._path, "missing", tensor=name)
        data = np.frombuffer(self._buffers[entry.file], np.uint8, entry.num_bytes, entry.start)
        return RawTensor(name, entry.shape, entry.dtype, data)

    def _add(self, name: str | None, entry: Entry) -> None:
        if name is None or (name == "output.weight" and self.config.tie_embeddings):
            return
        if entry.dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise UnsupportedError(f"{entry.file}: tensor {name!r} is {entry.dtype}; Paceline reads {supported}")
        if name in self._tensors:
            raise CheckpointError(entry.file, f"occurs in {self._tensors[name].file.name} too", tensor=name)
        self._tensors[name] = entry


def canonical_name(name: str) -> str | None:
    """The GGUF name of a Hugging Face tensor; the name itself when there is none, None for a computed buffer."""
    if name.endswith(COMPUTED_SUFFIXES):
        return None
    if match := BLOCK_PATTERN.fullmatch(name):
        layer, module, parameter = match.groups()
        return f"blk.{layer}.{BLOCK_NAMES[module]}.{parameter}" if module in BLOCK_NAMES else name
    return TOP_NAMES.get(name, name)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; CheckpointError when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value


def read_entries(path: Path, buffer: mmap.mmap) -> dict[str, Entry]:
    """Name -> place of every tensor of a mapped safetensors file. Raises CheckpointError naming file and tensor."""
    size = len(buffer)
    header_bytes = int.from_bytes(buffer[:8], "little")
    data_start = 8 + header_bytes
    if size < 8 or data_start > size:
        raise CheckpointError(path, f"announces a header of {header_bytes:,} bytes in a file of {size:,}: truncated?")
    try:
        header = json.loads(buffer[8:data_start])
    except ValueError as error:
        raise CheckpointError(path, f"the header is corrupt: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(path, "the header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, data_start, size) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: Any, data_start: int, file_bytes: int) -> Entry:
    try:
        dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
        valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(path, f"has the entry {fields!r}: corrupt", tensor=name)
    if data_start + end > file_bytes:
        raise CheckpointError(
            path, f"ends at byte {data_start + end:,} of a file of {file_bytes:,}: truncated?", tensor=name
        )
    if dtype in DTYPES and math.prod(shape) * BLOCK_KINDS[dtype][1] != end - begin:
        raise CheckpointError(path, f"is {dtype} {shape} but has {end - begin:,} bytes", tensor=name)
    return Entry(path, dtype, shape, data_start + begin, end - begin)


def _weight_files(directory: Path) -> list[Path]:
    index_path = directory / "model.safetensors.index.json"
    if not index_path.exists():
        return [directory / "model.safetensors"]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index_path, "lacks weight_map")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(index_path, f"names a shard outside of the directory: {name!r}")
    return [directory / name for name in names]
