"""Directories in Paceline's own format: blocks as the packer reads them, mapped without a conversion.

    config.json         ``quantization_config`` has quant_method "paceline", a version, ``interleaved_rope`` as a
                        checkpoint has it, and ``model``, the fields of ModelConfig. All else is the source's, for the
                        tokenizer and for people.
    *.safetensors       canonical names. A matrix in blocks is U8 [outputs, bytes of a row]; ``paceline.blocks`` in the
                        metadata, the text of a JSON object, has its kind and shape. What is not in blocks is F32, F16
                        or BF16. NAME.order, I32 [inputs], is there when column j is input order[j] of the layer.
    tokenizer files     as in any Hugging Face directory.

Any kind of ``raw.BLOCK_KINDS`` may occur, so embeddings and head can be quantised too, which other formats of
directories cannot do while they are tied.

Checked by: tests/unit/test_paceline_checkpoint.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.config import Activation, ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.registry import FAMILIES
from paceline.weights.inventory import check_inventory
from paceline.weights.mapped_file import map_file
from paceline.weights.raw import BLOCK_KINDS, RawTensor, TensorHeader
from paceline.weights.safetensors import DTYPES, weight_files
from paceline.weights.safetensors_header import Entry, read_entries, read_metadata

QUANT_METHOD = "paceline"
VERSION = 1
BLOCKS_KEY = "paceline.blocks"
ORDER_SUFFIX = ".order"
COUNTS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "context_length",
)
FLAGS = ("tie_embeddings", "attention_bias", "qk_norm")
FAMILY_FIELDS = frozenset(
    (
        "activation",
        "windowed_layers",
        "local_rope",
        "unrotated_layers",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "attention_scale",
        "attention_softcap",
        "logit_softcap",
        "output_bias",
        "attention_sinks",
        "experts",
    )
)
"""Fields of ModelConfig that only some families set."""


class PacelineCheckpoint:
    """A directory in Paceline's own format, memory-mapped; implements ``raw.Checkpoint``."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        """``values`` is its config.json. Raises CheckpointError or UnsupportedError, naming file and tensor."""
        self._path = path
        quantization = values["quantization_config"]
        if quantization.get("version") != VERSION:
            raise UnsupportedError(
                f"{path / 'config.json'}: version {quantization.get('version')!r} of Paceline's format; this release "
                f"reads version {VERSION}: update Paceline, or quantise again"
            )
        self.config = config_of(path / "config.json", quantization.get("model"))
        self.interleaved_rope = quantization.get("interleaved_rope")
        if not isinstance(self.interleaved_rope, bool):
            problem = f"quantization_config.interleaved_rope is {self.interleaved_rope!r}, expected a bool"
            raise CheckpointError(path / "config.json", problem)
        self._buffers = {file: map_file(file) for file in weight_files(path)}
        self._entries: dict[str, Entry] = {}
        self._blocks: dict[str, TensorHeader] = {}
        for file, buffer in self._buffers.items():
            entries = read_entries(file, buffer)
            if twice := self._entries.keys() & entries.keys():
                name = min(twice)
                raise CheckpointError(file, f"occurs in {self._entries[name].file.name} too", tensor=name)
            self._entries |= entries
            self._add_blocks(file, entries, read_metadata(file, buffer))
        check_inventory(path, self.config, {name: self.header(name).shape for name in self.names()})
        for name, entry in self._entries.items():
            if name.endswith(ORDER_SUFFIX) and name.removesuffix(ORDER_SUFFIX) not in self._entries:
                raise CheckpointError(entry.file, "is the order of a tensor that is not there", tensor=name)

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that the model is made of, for ``model_hash``."""
        return (self._path / "config.json", *self._buffers)

    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self._entries if not name.endswith(ORDER_SUFFIX))

    def header(self, name: str) -> TensorHeader:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(self._path, "missing", tensor=name)
        if name in self._blocks:
            return self._blocks[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(entry.file, f"is {entry.dtype} and not among {BLOCKS_KEY}", tensor=name)
        return TensorHeader(entry.shape, entry.dtype)

    def tensor(self, name: str) -> RawTensor:
        header = self.header(name)
        if header.kind == "Q8C":
            self._check_channel_scales(name, header.shape[0])
        return RawTensor(name, header.shape, header.kind, self._bytes(name), self._order(name, header.shape))

    def _check_channel_scales(self, name: str, num_outputs: int) -> None:
        """CheckpointError where blocks of one output differ in its scale: readers take it from whichever they like."""
        scales = self._bytes(name).reshape(num_outputs, -1, BLOCK_KINDS["Q8C"][1])[:, :, :4]
        if (scales != scales[:, :1]).any():
            raise CheckpointError(self._entries[name].file, "an output has several scales: damaged", tensor=name)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        entry = self._entries[name]
        return np.frombuffer(self._buffers[entry.file], np.uint8, entry.num_bytes, entry.start)

    def _order(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int32] | None:
        entry = self._entries.get(name + ORDER_SUFFIX)
        if entry is None:
            return None
        if len(shape) != 2 or (entry.dtype, entry.shape) != ("I32", (shape[1],)):
            problem = f"is {entry.dtype} {entry.shape}: no order of the inputs of a tensor {shape}"
            raise CheckpointError(entry.file, problem, tensor=name + ORDER_SUFFIX)
        order = self._bytes(name + ORDER_SUFFIX).view("<i4").astype(np.int32)  # aligned, wherever it lies in the file
        if not np.array_equal(np.sort(order), np.arange(shape[1])):
            raise CheckpointError(entry.file, "is no order of the inputs", tensor=name + ORDER_SUFFIX)
        return order

    def _add_blocks(self, file: Path, entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> None:
        try:
            given = json.loads(metadata[BLOCKS_KEY]).items()
            blocks = {name: (str(each["kind"]), tuple(each["shape"])) for name, each in given}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(file, f"the metadata {BLOCKS_KEY} is missing or damaged") from error
        for name, (kind, shape) in blocks.items():
            if name not in entries:
                continue  # in another part: all parts have the whole list
            if kind not in BLOCK_KINDS:
                raise UnsupportedError(
                    f"{file}: tensor {name!r} is of kind {kind!r}; Paceline has {', '.join(BLOCK_KINDS)}"
                )
            block, block_bytes = BLOCK_KINDS[kind]
            rows = len(shape) == 2 and all(type(size) is int and size > 0 for size in shape) and shape[1] % block == 0
            entry = entries[name]
            if not rows or (entry.dtype, entry.shape) != ("U8", (shape[0], shape[1] // block * block_bytes)):
                raise CheckpointError(file, f"is {kind} {shape} but has {entry.dtype} {entry.shape}", tensor=name)
            self._blocks[name] = TensorHeader(shape, kind)


def config_values(config: ModelConfig, *, interleaved_rope: bool) -> dict[str, Any]:
    """What config.json says of such a model, beside what the source's says."""
    quantization = {
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "interleaved_rope": interleaved_rope,
        "model": _written(config),
    }
    return {"quantization_config": quantization}


def _written(config: ModelConfig) -> dict[str, Any]:
    """The fields as JSON values. Those that only some families have are left out where they are as usual, so that
    releases that do not know them read the others' files.
    """
    usual = {field.name: field.default for field in fields(ModelConfig)}
    return {name: value for name, value in asdict(config).items() if name not in FAMILY_FIELDS or value != usual[name]}


def config_of(path: Path, values: Any) -> ModelConfig:
    """The ModelConfig whose fields are ``values``. Raises CheckpointError; ``path`` is only for errors."""
    if not isinstance(values, dict) or not isinstance(values.get("rope"), dict):
        raise CheckpointError(path, f"quantization_config.model is {values!r}, expected an object with rope")
    names = {field.name for field in fields(ModelConfig)}
    if unknown := values.keys() - names:
        raise UnsupportedError(f"{path}: quantization_config.model has {', '.join(sorted(unknown))}: update Paceline")
    whole = [(name, values.get(name)) for name in COUNTS]
    whole += [(name, values[name]) for name in ("sliding_window",) if values.get(name) is not None]
    for name, value in whole:
        if type(value) is not int or value < 1:
            raise CheckpointError(path, f"quantization_config.model.{name} is {value!r}, expected a positive integer")
    for name in FLAGS:
        if not isinstance(values.get(name), bool):
            raise CheckpointError(path, f"quantization_config.model.{name} is {values.get(name)!r}, expected a bool")
    if values.get("architecture") not in {family.architecture for family in FAMILIES if family.classes}:
        raise UnsupportedError(f"{path}: quantization_config.model.architecture is {values.get('architecture')!r}")
    if values.get("experts") is not None:
        raise UnsupportedError(f"{path}: quantization_config.model.experts: Paceline quantises dense models")
    try:
        read = {"rope": _rope_of(values["rope"]), "rms_norm_eps": float(values["rms_norm_eps"])}
        config = ModelConfig(**{**values, **read, **_family_fields(values)})
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(path, f"quantization_config.model is damaged: {error}") from error
    _check_values(path, config)
    return config


def _rope_of(given: Mapping[str, Any]) -> RopeConfig:
    """Raises TypeError, ValueError and KeyError for what cannot be one."""
    scaling = None if given.get("scaling") is None else _scaling_of(given["scaling"])
    return RopeConfig(**{**given, "theta": float(given["theta"]), "dim": int(given["dim"]), "scaling": scaling})


def _family_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``FAMILY_FIELDS`` that are given. Raises TypeError and ValueError for what they cannot be."""
    given = {name: values[name] for name in FAMILY_FIELDS & values.keys()}
    for name, value in given.items():
        if name in ("windowed_layers", "unrotated_layers"):
            item = bool if name == "windowed_layers" else int
            if not isinstance(value, list) or any(type(each) is not item for each in value):
                raise ValueError(f"{name} is {value!r}")
            given[name] = tuple(value)
        elif name == "local_rope":
            if value is not None and (not isinstance(value, dict) or value.keys() != {"theta", "dim", "scaling"}):
                raise ValueError(f"{name} is {value!r}")
            given[name] = None if value is None else _rope_of(value)
        elif name == "activation":
            if value not in get_args(Activation):
                raise ValueError(f"{name} is {value!r}")
        elif name in ("output_bias", "attention_sinks"):
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}")
        elif value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise ValueError(f"{name} is {value!r}")
    return given


def _scaling_of(given: Mapping[str, Any]) -> RopeScaling:
    """Raises TypeError, ValueError and KeyError for what cannot be one."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    numbers = {name: float(given[name]) for name in names if name in given or name in names[:3]}
    factors, context = tuple(map(float, given["factors"])), int(given["original_context"])
    long_factors = tuple(map(float, given.get("long_factors", ())))
    read = {**given, **numbers, "factors": factors, "long_factors": long_factors, "original_context": context}
    return RopeScaling(**read)


def _check_values(path: Path, config: ModelConfig) -> None:
    """CheckpointError for values that no such model has; arithmetic would go on with most of them."""
    possible = {
        "rms_norm_eps": 0 < config.rms_norm_eps < math.inf,
        "num_kv_heads": config.num_heads % config.num_kv_heads == 0,
        "windowed_layers": len(config.windowed_layers) in (0, config.num_layers),
        "unrotated_layers": all(0 <= layer < config.num_layers for layer in config.unrotated_layers),
        "draft_vocab_size": config.draft_vocab_size is None,
        "input_norms": config.input_norms is False,
    } | _possible_rope("rope", config.rope, config.head_dim)
    if config.local_rope is not None:
        possible |= _possible_rope("local_rope", config.local_rope, config.head_dim)
        # Rows of q and k have one order in all layers.
        possible["local_rope.dim"] &= config.local_rope.dim == config.rope.dim
    for name, is_possible in possible.items():
        if not is_possible:
            given = attrgetter(name)(config)
            raise CheckpointError(path, f"quantization_config.model.{name} is {given!r}, which no such model has")


def _possible_rope(name: str, rope: RopeConfig, head_dim: int) -> dict[str, bool]:
    """Whether each field of a rotation is one that a model has, by its path in the configuration."""
    scaling = rope.scaling or RopeScaling("linear")
    counts = {"factors": (1, 0), "longrope": (1, 1)}.get(scaling.kind, (0, 0))
    num_factors, num_long_factors = (count * rope.dim // 2 for count in counts)
    fields_of_scaling = {
        "kind": scaling.kind in ("linear", "llama3", "factors", "yarn", "longrope"),
        "factor": 0 < scaling.factor < math.inf,
        "low_freq_factor": 0 < scaling.low_freq_factor < math.inf,
        "high_freq_factor": scaling.low_freq_factor < scaling.high_freq_factor < math.inf,
        "original_context": 0 < scaling.original_context < math.inf,
        "factors": _are_positive(scaling.factors, num_factors),
        "long_factors": _are_positive(scaling.long_factors, num_long_factors),
        "beta_fast": 0 < scaling.beta_slow < scaling.beta_fast < math.inf,
        "attention_factor": 0 < scaling.attention_factor < math.inf,
        "truncate": isinstance(scaling.truncate, bool),
    }
    return {
        f"{name}.theta": (1 if scaling.kind == "yarn" else 0) < rope.theta < math.inf,
        f"{name}.dim": 0 < rope.dim <= head_dim and rope.dim % 2 == 0,
    } | {f"{name}.scaling.{field}": is_possible for field, is_possible in fields_of_scaling.items()}


def _are_positive(numbers: tuple[float, ...], count: int) -> bool:
    return len(numbers) == count and all(0 < number < math.inf for number in numbers)
