"""What the writers of all formats do with a tensor before they write it: kinds, order of rows, names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig
from paceline.errors import CheckpointError, ParameterError
from paceline.models.family import BLOCK_NAMES, TOP_NAMES
from paceline.quantize.model import QuantizedModel
from paceline.weights.blocks import bf16_to_f32, dequantize, f32_to_bf16
from paceline.weights.packing import rope_permutation
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import RawTensor

F32 = NDArray[np.float32]
Rows = NDArray[np.int64]

HUGGING_FACE_TOP_NAMES = {ours: theirs for theirs, ours in TOP_NAMES.items()}
HUGGING_FACE_BLOCK_NAMES = {ours: theirs for theirs, ours in BLOCK_NAMES.items()}
FLOAT_KINDS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class FloatTensor:
    """A tensor that is not quantised; ``data`` [shape] are its numbers, those of BF16 as u16."""

    kind: str
    data: NDArray[Any]


def huggingface_name(name: str) -> str:
    """The name in a Hugging Face file of a tensor with that canonical name."""
    if not name.startswith("blk."):
        return HUGGING_FACE_TOP_NAMES[name]
    _, layer, module, parameter = name.split(".")
    return f"model.layers.{layer}.{HUGGING_FACE_BLOCK_NAMES[module]}.{parameter}"


def half_split_rows(config: ModelConfig, name: str) -> Rows | None:
    """Row r of the tensor in Hugging Face's order is row ``rows[r]`` of one whose rotary pairs are neighbours."""
    order = interleaved_rows(config, name)
    return None if order is None else np.argsort(order)


def interleaved_rows(config: ModelConfig, name: str) -> Rows | None:
    """Row r of a tensor with rotary pairs as neighbours is row ``rows[r]`` in Hugging Face's order; None: no pairs."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads, "attn_q_norm": 1, "attn_k_norm": 1}
    if part not in heads:
        return None
    return rope_permutation(heads[part], config.head_dim, config.rope.dim).astype(np.int64)


def with_rows(matrix: QuantizedMatrix, rows: Rows | None) -> QuantizedMatrix:
    """The matrix with row ``rows[r]`` as row r."""
    if rows is None:
        return matrix
    return replace(matrix, codes=matrix.codes[rows], scale=matrix.scale[rows], zero=matrix.zero[rows])


def refuse_order(fmt: str, name: str) -> NoReturn:
    """ParameterError for a matrix whose groups are not consecutive."""
    problem = f"{name} has its inputs in an order of its own (activation order); formats that hold it: gptq, paceline"
    raise ParameterError("format", fmt, problem)


def finite_values(model: QuantizedModel, name: str) -> F32:
    """The values of a tensor that is not quantised. CheckpointError when one is infinite or not a number."""
    values = model.values(name)
    if not np.isfinite(values).all():
        raise CheckpointError(model.checkpoint.path, "a value is infinite or not a number", tensor=name)
    return values


def unchanged(model: QuantizedModel, name: str, values: F32) -> RawTensor | None:
    """The tensor as the source holds it, None when a method has changed it."""
    raw = model.checkpoint.tensor(name)
    return raw if np.array_equal(dequantize(raw), values) else None


def float_tensor(model: QuantizedModel, name: str) -> FloatTensor:
    """A tensor that is not quantised, exactly, in the source's type where that holds it and in F32 where not.

    One exception: a matrix that the source holds quantised (the embeddings of a GGUF file) becomes F16, which moves a
    value by at most 2^-11 of itself; F32 would double its bytes to keep the last bits of what 8 bits are.
    """
    values = finite_values(model, name)
    kind = model.checkpoint.tensor(name).kind
    if kind not in FLOAT_KINDS:
        kind = "F16" if values.ndim == 2 and float(np.abs(values).max()) < np.finfo(np.float16).max else "F32"
        return FloatTensor(kind, values.astype(np.float16 if kind == "F16" else np.float32))
    if kind == "BF16":
        bits = f32_to_bf16(values)
        if np.array_equal(bf16_to_f32(bits), values):
            return FloatTensor("BF16", bits)
    elif kind == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float32), values):
            return FloatTensor("F16", half)
    return FloatTensor("F32", np.ascontiguousarray(values, np.float32))
