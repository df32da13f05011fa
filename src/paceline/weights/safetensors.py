"""Hugging Face directories: config.json and safetensors, read without a copy.

Source: the safetensors format (huggingface/safetensors, README).
Departures: the library hands out numpy arrays, and numpy has no bfloat16; this reader hands out bytes.
Checked by: tests/unit/test_safetensors.py, against the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.family import BLOCK_NAMES, TOP_NAMES
from paceline.models.registry import config_from_json, family_of
from paceline.weights.blocks import dequantize
from paceline.weights.expert_tensors import ExpertReader, MadeTensor
from paceline.weights.inventory import Shape, check_inventory, check_layers, expected_shapes, rows_of_parts
from paceline.weights.mapped_file import map_file
from paceline.weights.quantization_config import Quantization, read_quantization
from paceline.weights.quantized_modules import QuantizedModule, is_zero, split_modules
from paceline.weights.raw import RawTensor, TensorHeader
from paceline.weights.safetensors_header import Entry, read_entries

DTYPES = ("F32", "F16", "BF16")

BLOCK_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)")
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
"""Buffers that old versions of Transformers saved; they follow from the configuration."""

OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


class HuggingFaceCheckpoint:
    """A directory with config.json and safetensors, memory-mapped; implements ``raw.Checkpoint``.

    Tensors that are quantised (``quantization_config``) are built when they are asked for, others are views of a file.
    """

    def __init__(self, path: Path) -> None:
        """Reads config.json and all headers. Raises CheckpointError or UnsupportedError, naming file and tensor."""
        self._path = path
        self.interleaved_rope = False
        values = read_json(path / "config.json")
        self.config = config_from_json(path / "config.json", values)
        self._family = family_of(self.config.architecture)
        self._buffers = {file: map_file(file) for file in weight_files(path)}
        entries = self._read_entries()
        self._config_files, quantization = _read_quantization(path, values, entries)
        check_layers(path, self.config, len(entries))
        self._needed = expected_shapes(self.config)
        self._made: dict[str, MadeTensor] = {}
        self._tensors: dict[str, Entry] = {}
        modules: dict[str, QuantizedModule] = {}
        if quantization is not None:
            planes, entries = split_modules(entries)
            modules = {name: QuantizedModule(name, quantization, planes[name], self._buffers) for name in planes}
        used = self._add_experts(entries, modules)
        for name, module in modules.items():
            if name not in used:
                for part, rows in self._parts(f"{name}.weight", module.shape).items():
                    self._add_module(name, part, module.part(rows))
        for name, entry in entries.items():
            if name not in used and not self._is_needless(name, entry, modules):
                parts = self._parts(name, entry.shape)
                for part, rows in parts.items():
                    self._add(part, entry.part(rows) if len(parts) > 1 else entry)
        shapes = {name: made.shape for name, made in self._made.items()}
        check_inventory(path, self.config, shapes | {name: entry.shape for name, entry in self._tensors.items()})

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that the model is made of, for ``model_hash``: the tokenizer's files change no key and no value."""
        return (*self._config_files, *self._buffers)

    def names(self) -> tuple[str, ...]:
        return (*self._tensors, *self._made)

    def header(self, name: str) -> TensorHeader:
        if name in self._made:
            return self._made[name].header
        entry = self._entry(name)
        return TensorHeader(entry.shape, "F32" if self._has_offset(name) else entry.dtype)

    def tensor(self, name: str) -> RawTensor:
        if name in self._made:
            return self._made[name].tensor(name)
        entry = self._entry(name)
        data = np.frombuffer(self._buffers[entry.file], np.uint8, entry.num_bytes, entry.start)
        raw = RawTensor(name, entry.shape, entry.dtype, data)
        if not self._has_offset(name):
            return raw
        values = dequantize(replace(raw, shape=(1, *raw.shape))) + np.float32(self._family.norm_offset)
        return RawTensor(name, raw.shape, "F32", values.reshape(-1).view(np.uint8))

    def _has_offset(self, name: str) -> bool:
        """Whether the file holds less than the weight of this norm."""
        return self._family.norm_offset != 0 and name.endswith("norm.weight")

    def _parts(self, own_name: str, shape: Shape) -> dict[str, range]:
        """The canonical tensors that a tensor of the file is, with their rows."""
        name = canonical_name(own_name, self._family.block_names, self._family.tensor_names)
        return rows_of_parts(self._path, name, shape[0] if shape else 0, self._family.fused, self._needed)

    def _add_experts(self, entries: Mapping[str, Entry], modules: Mapping[str, QuantizedModule]) -> set[str]:
        """Keep the tensors of experts; returns what they are made of."""
        reader = ExpertReader(self._path, entries, modules, self._buffers)
        for name, shape in self._needed.items():
            _, layer, suffix = name.split(".", 2) if name.startswith("blk.") else ("", "", "")
            sources = self._family.expert_sources.get(suffix, ())
            if made := reader.find(f"model.layers.{layer}.", sources, num_experts=shape[0]):
                self._made[name] = made
        return reader.used

    def _is_needless(self, name: str, entry: Entry, modules: Mapping[str, QuantizedModule]) -> bool:
        """Writers of GPTQ files give every layer a bias, of zeros where the model has none."""
        is_extra = name.removesuffix(".bias") in modules and not self._parts(name, entry.shape).keys() & self._needed
        return is_extra and entry.dtype in DTYPES and is_zero(entry, self._buffers[entry.file])

    def _entry(self, name: str) -> Entry:
        if name not in self._tensors:
            raise CheckpointError(self._path, "missing", tensor=name)
        return self._tensors[name]

    def _read_entries(self) -> dict[str, Entry]:
        """All tensors by their names in a model of text alone, without those that follow from the configuration."""
        entries: dict[str, Entry] = {}
        for file, buffer in self._buffers.items():
            for own_name, entry in read_entries(file, buffer).items():
                name = self._family.text_name(own_name)
                if name is None or name.endswith(COMPUTED_SUFFIXES):
                    continue
                if name in entries:
                    problem = f"occurs in {entries[name].file.name} too"
                    raise CheckpointError(file, problem, tensor=name)
                entries[name] = entry
        return entries

    def _add(self, name: str, entry: Entry) -> None:
        """Keep a plain tensor."""
        if name == "output.weight" and self.config.tie_embeddings:
            return
        if entry.dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise UnsupportedError(f"{entry.file}: tensor {name!r} is {entry.dtype}; Paceline reads {supported}")
        if name in self._tensors or name in self._made:
            raise CheckpointError(entry.file, "occurs twice, under two names", tensor=name)
        self._tensors[name] = entry

    def _add_module(self, module: str, name: str, quantized: QuantizedModule) -> None:
        """Keep a quantised matrix, by its canonical name; ``module`` is what the file calls it."""
        if name == "output.weight" and self.config.tie_embeddings:
            raise UnsupportedError(
                f"{self._path / 'config.json'}: tie_word_embeddings is true, but {module} has codes of its own: "
                "set it to false to use these"
            )
        self._made[name] = quantized


def canonical_name(
    name: str, block_names: Mapping[str, str] = BLOCK_NAMES, tensor_names: Mapping[str, str] | None = None
) -> str:
    """The GGUF name of a Hugging Face tensor; the name itself when there is none."""
    if match := BLOCK_PATTERN.fullmatch(name):
        layer, tensor = match.groups()
        module, _, parameter = tensor.rpartition(".")
        if tensor_names and tensor in tensor_names:
            return f"blk.{layer}.{tensor_names[tensor]}"
        is_known = module in block_names and parameter in ("weight", "bias")
        return f"blk.{layer}.{block_names[module]}.{parameter}" if is_known else name
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


def _read_quantization(
    directory: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]
) -> tuple[tuple[Path, ...], Quantization | None]:
    """The files that describe the model, and how it is quantised: by config.json, or by the file that old versions of
    AutoGPTQ and AutoAWQ wrote beside it.
    """
    path = directory / "config.json"
    found = read_quantization(path, config)
    if found is None and any(name.endswith(".qweight") for name in entries):
        for name, method in OLD_CONFIGS.items():
            old = directory / name
            if old.exists():
                values = {"quant_method": method, **read_json(old)}
                return (path, old), read_quantization(old, {"quantization_config": values})
    return (path,), found


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: those that its index names, else model.safetensors."""
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
