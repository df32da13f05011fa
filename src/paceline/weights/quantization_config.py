"""What a config.json says about quantised weights: how the planes of each module hold its matrix.

Source: the configurations that AutoGPTQ, GPTQModel, AutoAWQ and compressed-tensors write, from their code.

Whether a module is quantised is seen in its tensors; the configuration says how to read them. So lists of modules that
were left alone (``modules_to_not_convert``, ``lm_head``) need not be read, and keys that only tell how the codes were
found (``damp_percent``, ``true_sequential``, ``observer``, ...) are passed over. A key that changes what the weights
are, or what is done to activations, is read or is an UnsupportedError that names it.

Checked by: tests/unit/test_quantization_config.py, tests/golden/test_compressed_tensors.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights import awq, gptq
from paceline.weights.awq import AWQLayout
from paceline.weights.compressed_tensors import Int8Layout, PackedLayout
from paceline.weights.gptq import GPTQLayout
from paceline.weights.planes import Layout
from paceline.weights.quantized_matrix import BLOCK_GROUPS

METHODS = ("gptq", "awq", "compressed-tensors", "mxfp4")
GROUP_STEP = BLOCK_GROUPS[-1]
MODULE_CLASSES = {"model.embed_tokens": "Embedding"}
"""Class of a module in Transformers; all others with a matrix are "Linear"."""


class Quantization(Protocol):
    """How the modules of a checkpoint are quantised."""

    def layout(self, module: str) -> Layout:
        """That of a module that has codes. UnsupportedError when the configuration has none for it."""
        ...


def read_quantization(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """From a config.json, None when nothing is quantised; ``path`` is for errors.

    Raises UnsupportedError that names the key which asks for more than Paceline does, CheckpointError for a value that
    cannot be.
    """
    key = next((key for key in ("quantization_config", "compression_config") if config.get(key)), None)
    if key is None:
        return None
    if not isinstance(config[key], Mapping):
        raise CheckpointError(path, f"{key} is {config[key]!r}, expected an object")
    values = Values(path, key, config[key])
    method = values.one_of("quant_method", METHODS, "compressed-tensors" if key == "compression_config" else None)
    if method == "gptq":
        return GPTQRules.read(values)
    if method == "mxfp4":  # experts of gpt-oss, which are found by the names of their planes
        return None
    if method == "awq":
        return AWQRules.read(values)
    return CompressedRules.read(values)


@dataclass(frozen=True)
class Values:
    """An object in a configuration; errors name the file and the keys that lead to a value."""

    path: Path
    where: str
    values: Mapping[str, Any]

    def unsupported(self, key: str, reads: str) -> UnsupportedError:
        """What Paceline reads instead of the value of ``key``."""
        return UnsupportedError(f"{self.path}: {self.where}.{key} is {self.values.get(key)!r}; Paceline reads {reads}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def one_of(self, key: str, allowed: Collection[Any], default: Any = None) -> Any:
        """The value, which is one of ``allowed``, text in any case. UnsupportedError when it is not."""
        value = self.get(key, default)
        value = value.lower() if isinstance(value, str) else value
        choices = tuple(allowed)
        if isinstance(value, bool) is not isinstance(choices[0], bool) or value not in choices:
            raise self.unsupported(key, ", ".join(map(str, choices)))
        return choices[choices.index(value)]  # not the value: 4.0 is 4, but no number of bits

    def group(self, key: str, default: int | None) -> int | None:
        """Inputs that share a scale; -1 and 0 are all of them, None."""
        value = self.get(key, default)
        if value is None or (isinstance(value, int) and value in (-1, 0)):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % GROUP_STEP:
            raise self.unsupported(key, f"multiples of {GROUP_STEP} (32, 64, 128), and -1 for one scale an output")
        return value

    def child(self, key: str) -> Values:
        """The object that is the value of ``key``."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(self.path, f"{self.where}.{key} is {value!r}, expected an object")
        return Values(self.path, f"{self.where}.{key}", value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, none when it is absent."""
        value = self.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(self.path, f"{self.where}.{key} is {value!r}, expected a list of strings")
        return tuple(value)

    def refuse(self, keys: Mapping[str, str]) -> None:
        """UnsupportedError for the first key that is there and neither null, false nor empty."""
        for key, why in keys.items():
            if self.values.get(key):
                raise UnsupportedError(f"{self.path}: {self.where}.{key}: {why}")


def matches(path: Path, pattern: str, name: str) -> bool:
    """Whether a name begins with what the pattern says. CheckpointError when it is no regular expression."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(path, f"{pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True)
class GPTQRules:
    """``dynamic`` gives modules whose name a pattern matches other values, or leaves them alone."""

    values: Values
    base: GPTQLayout
    dynamic: tuple[tuple[str, Values | None], ...]

    @staticmethod
    def read(values: Values) -> GPTQRules:
        """Raises as ``read_quantization`` does."""
        values.refuse(
            {
                "is_marlin_format": "codes in the order of the Marlin kernel; Paceline reads gptq and gptq_v2",
                "rotation": "weights that were rotated need activations that are",
                "adapter": "an adapter (LoRA) beside the codes",
            }
        )
        values.one_of("pack_dtype", ("int32", "torch.int32"), "int32")
        dynamic: list[tuple[str, Values | None]] = []
        for pattern in values.child("dynamic").values if values.get("dynamic") else {}:
            overrides = values.child("dynamic").child(pattern)
            is_skipped = pattern.startswith("-:")
            dynamic.append((pattern.removeprefix("-:").removeprefix("+:"), None if is_skipped else overrides))
        return GPTQRules(values, _gptq_layout(values), tuple(dynamic))

    def layout(self, module: str) -> Layout:
        """As ``Quantization.layout``."""
        for pattern, overrides in self.dynamic:
            if matches(self.values.path, pattern, module):
                if overrides is None:
                    raise UnsupportedError(
                        f"{self.values.path}: {module} has codes, but {self.values.where}.dynamic leaves it alone"
                    )
                merged = {**self.values.values, **overrides.values}
                return _gptq_layout(Values(overrides.path, overrides.where, merged))
        return self.base


def _gptq_layout(values: Values) -> GPTQLayout:
    key = "checkpoint_format" if values.get("checkpoint_format") is not None else "format"
    versions: dict[str, Literal[1, 2]] = {"gptq": 1, "gptq_v2": 2}
    version = versions[values.one_of(key, versions, "gptq")]
    bits = values.one_of("bits", gptq.BITS)
    group = values.group("group_size", 128)
    static = values.one_of("static_groups", (True, False), False)
    return GPTQLayout(bits, group, version, ordered=values.one_of("desc_act", (True, False), False) and not static)


@dataclass(frozen=True)
class AWQRules:
    """One layout for all modules."""

    of_all: AWQLayout

    @staticmethod
    def read(values: Values) -> AWQRules:
        """Raises as ``read_quantization`` does. Reads the keys of AutoAWQ's own files too: w_bit, q_group_size."""
        values.one_of("version" if values.get("version") is not None else "format", ("gemm",), "gemm")
        if str(values.get("backend", "")).lower() == "llm-awq":
            raise values.unsupported("backend", "codes in the order of AutoAWQ's gemm")
        values.one_of("w_bit" if "w_bit" in values.values else "bits", (awq.BITS,), awq.BITS)
        return AWQRules(
            AWQLayout(values.group("q_group_size" if "q_group_size" in values.values else "group_size", 128))
        )

    def layout(self, module: str) -> Layout:
        """As ``Quantization.layout``."""
        return self.of_all


@dataclass(frozen=True)
class CompressedRules:
    """Layouts by target: a module's name, "re:" and a pattern of names, or a class; None where weights are plain."""

    values: Values
    layouts: Mapping[str, Layout | None]
    ignore: tuple[str, ...]

    @staticmethod
    def read(values: Values) -> CompressedRules:
        """Raises as ``read_quantization`` does."""
        values.one_of("quantization_status", ("compressed",), "compressed")
        values.refuse(
            {
                "kv_cache_scheme": "keys and values rounded with scales of the file; remove it to keep them in the "
                "format that --kv says",
                "moe_sparsity_config": "sparse experts",
            }
        )
        for key, at_rest in (("sparsity_config", "format"), ("transform_config", "config_groups")):
            inner = values.child(key) if values.get(key) else None
            if inner is not None and inner.get(at_rest) and inner.get(at_rest) != "dense":
                raise inner.unsupported(at_rest, "none")
        layouts: dict[str, Layout | None] = {}
        groups = values.child("config_groups")
        for name in groups.values:
            scheme = groups.child(name)
            layout = _compressed_layout(scheme, scheme.get("format") or values.get("format"))
            layouts |= dict.fromkeys(scheme.texts("targets"), layout)
        return CompressedRules(values, layouts, values.texts("ignore"))

    def layout(self, module: str) -> Layout:
        """As ``Quantization.layout``. A name goes before a pattern, and a pattern before a class."""
        where = f"{self.values.path}: {module} has codes, but {self.values.where}"
        if any(self._rank(target, module) is not None for target in self.ignore):
            raise UnsupportedError(f"{where}.ignore leaves it alone")
        ranks = {target: self._rank(target, module) for target in self.layouts}
        found = [(rank, target) for target, rank in ranks.items() if rank is not None]
        layout = self.layouts[min(found)[1]] if found else None
        if layout is None:
            raise UnsupportedError(f"{where}.config_groups has no weights for it")
        return layout

    def _rank(self, target: str, module: str) -> int | None:
        """How closely a target names a module: 0 by name, 1 by pattern, 2 by class, None not at all."""
        if target == module:
            return 0
        if target.startswith("re:"):
            return 1 if matches(self.values.path, target.removeprefix("re:"), module) else None
        return 2 if target == MODULE_CLASSES.get(module, "Linear") else None


def _compressed_layout(scheme: Values, format_name: object) -> Layout | None:
    """The layout of one config group, None when it has no weights."""
    if scheme.get("output_activations"):
        raise UnsupportedError(f"{scheme.path}: {scheme.where}.output_activations: rounded outputs")
    if scheme.get("weights") is None:
        return None
    formats = ("pack-quantized", "int-quantized", "naive-quantized")
    name = Values(scheme.path, scheme.where, {"format": format_name}).one_of("format", formats)
    weights = scheme.child("weights")
    weights.one_of("type", ("int",), "int")
    weights.one_of("dynamic", (False,), False)
    bits = weights.one_of("num_bits", range(2, 9))
    group = weights.group("group_size", None)
    implied = "group" if group else "tensor" if weights.get("group_size") is None else "channel"
    strategy = weights.one_of("strategy", ("group", "channel", "tensor"), implied)
    if (strategy == "group") is not (group is not None):
        raise weights.unsupported("group_size", "a size for the strategy group, and none (or -1) for others")
    symmetric = weights.one_of("symmetric", (True, False), True)
    ordered = weights.get("actorder") in (True, "group", "dynamic")
    per_token = scheme.get("input_activations") is not None
    if per_token:
        _check_activations(scheme.child("input_activations"))
        if name == "pack-quantized" or (bits, group, symmetric) != (8, None, True):
            raise UnsupportedError(
                f"{scheme.path}: {scheme.where}.input_activations: int8 activations with weights of {bits} bits "
                f"({name}, {strategy}, {'symmetric' if symmetric else 'asymmetric'}); Paceline has them with weights "
                "that are int-quantized, 8 bits, symmetric, one scale an output"
            )
    if name == "pack-quantized":
        return PackedLayout(bits, group, symmetric, ordered)
    if ordered:
        raise weights.unsupported("actorder", f"weight or none with {name}")
    return Int8Layout(bits, group, symmetric, per_token)


def _check_activations(inputs: Values) -> None:
    """UnsupportedError unless activations are rounded to int8 with one scale a token, found as they come."""
    inputs.one_of("type", ("int",), "int")
    inputs.one_of("num_bits", (8,), 8)
    inputs.one_of("symmetric", (True,), True)
    inputs.one_of("dynamic", (True,), False)
    inputs.one_of("strategy", ("token",), "tensor")
