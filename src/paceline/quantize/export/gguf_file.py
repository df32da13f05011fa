"""GGUF files of Q4_0, Q4_1 and Q8_0, through the ``gguf`` library's writer.

Symmetric 4-bit matrices are Q4_0 and symmetric 8-bit ones Q8_0, exactly. Q4_1 says w = d q + m where the matrix says
s (q - z): m is -s z rounded to f16, which moves all weights of a group by at most 2^-11 of |s z| (2^-25 where that is
below 2^-14), a small part of a step s for z <= 15.

What is not quantised: vectors are F32, as llama.cpp wants them. Embeddings and head keep the bytes of a GGUF source;
floats become Q8_0 unless ``head_bits`` says otherwise: a head of F16 would be more bytes than all layers of a small
model together, and eight bits cost it next to nothing (``docs/quantization.md`` has the numbers).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import ModelConfig
from paceline.errors import ParameterError
from paceline.models.gguf_keys import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from paceline.ops.reference import inverse_frequencies
from paceline.quantize.export.gguf_metadata import metadata_of
from paceline.quantize.export.head import EMBEDDING, GGUF_BLOCKS, HEAD, head_tensor, q4_1_blocks
from paceline.quantize.export.spool import TensorSpool
from paceline.quantize.export.tensors import (
    F32,
    FLOAT_KINDS,
    Rows,
    finite_values,
    float_tensor,
    interleaved_rows,
    refuse_order,
    unchanged,
    with_rows,
)
from paceline.quantize.model import QuantizedModel
from paceline.weights.checksums import KEY, metadata_checksum
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import RawTensor

if TYPE_CHECKING:
    import gguf

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
"""``general.file_type`` of a file most of whose matrices are of that kind."""


def write_gguf_file(model: QuantizedModel, path: Path, *, head_bits: int | None) -> None:
    """Makes the file; ``check_format`` has been asked. ParameterError for a matrix whose inputs are not in order."""
    with TensorSpool(path.parent / "spool") as spool:
        for name in model.checkpoint.names():
            raw = _tensor(model, name, head_bits)
            spool.add(raw.name, raw.kind, raw.shape, raw.data)
        for name, factors in _rope_vectors(model.checkpoint.config).items():
            spool.add(name, "F32", factors.shape, factors.view(np.uint8))
        metadata = metadata_of(model.checkpoint)
        metadata["general.file_type"] = FILE_TYPES[_most_of(model)]
        metadata["general.quantization_version"] = 2
        _write_file(path, spool, metadata)


def _most_of(model: QuantizedModel) -> str:
    if model.scheme.bits == 8:
        return "Q8_0"
    return "Q4_0" if model.scheme.symmetric else "Q4_1"


def _tensor(model: QuantizedModel, name: str, head_bits: int | None) -> RawTensor:
    checkpoint = model.checkpoint
    rows = None
    if checkpoint.config.architecture == "llama" and not checkpoint.interleaved_rope:
        rows = interleaved_rows(checkpoint.config, name)
    matrix = model.matrix(name)
    if matrix is not None:
        return quantized_tensor(name, with_rows(matrix, rows))
    if name in (EMBEDDING, HEAD):
        return head_tensor(model, name, head_bits=head_bits, default_bits=8)
    values = finite_values(model, name)
    if values.ndim == 1:
        vector = np.ascontiguousarray(values if rows is None else values[rows], "<f4")
        return RawTensor(name, vector.shape, "F32", vector.view(np.uint8))
    raw = unchanged(model, name, values)
    if raw is not None and raw.order is None and raw.kind in (*FLOAT_KINDS, *GGUF_BLOCKS):
        return raw if rows is None else replace(raw, data=_row_bytes(raw, rows))
    plain = float_tensor(model, name)
    data = plain.data if rows is None else plain.data[rows]
    return RawTensor(name, data.shape, plain.kind, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def _row_bytes(raw: RawTensor, rows: Rows) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(raw.data.reshape(raw.shape[0], -1)[rows]).reshape(-1)


def quantized_tensor(name: str, matrix: QuantizedMatrix) -> RawTensor:
    """A matrix with groups of 32 as Q4_0, Q4_1 or Q8_0."""
    if matrix.order is not None:
        refuse_order("gguf", name)
    raw = matrix.blocks(name)
    if raw.kind != "Q4G32Z":
        assert raw.kind in FILE_TYPES, raw.kind
        return raw
    scale = matrix.scale.astype(np.float32)
    minimum = -(scale * matrix.zero.astype(np.float32))
    if float(np.abs(minimum).max()) > np.finfo(np.float16).max:
        raise ParameterError("format", "gguf", f"{name} has weights beyond the range of f16")
    return RawTensor(name, raw.shape, "Q4_1", q4_1_blocks(matrix.codes, scale, minimum))


def _rope_vectors(config: ModelConfig) -> dict[str, F32]:
    """The tensors that say what a GGUF file's frequencies are divided by; none when metadata say it."""
    rope, scaling = config.rope, config.rope.scaling
    if scaling is None or scaling.kind in ("linear", "yarn"):
        return {}
    if scaling.kind == "longrope":
        found = {SHORT_FACTORS: scaling.factors, LONG_FACTORS: scaling.long_factors}
    elif scaling.kind == "factors":
        found = {ROPE_FACTORS: scaling.factors}
    else:
        pairs = rope.dim // 2
        plain = inverse_frequencies(replace(rope, scaling=None), config.head_dim)[:pairs]
        found = {ROPE_FACTORS: tuple(plain / inverse_frequencies(rope, config.head_dim)[:pairs])}
    return {name: np.asarray(factors, "<f4") for name, factors in found.items()}


def _write_file(path: Path, spool: TensorSpool, metadata: Mapping[str, Any]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key != "general.architecture":  # the writer has added it
            writer.add_key_value(key, value.tolist() if isinstance(value, np.ndarray) else value, *_type_of(value))
    checksums = {
        "metadata": metadata_checksum(metadata),
        "tensors": {tensor.name: tensor.checksum for tensor in spool.tensors},
    }
    writer.add_string(KEY, json.dumps(checksums))
    for tensor in spool.tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in spool.tensors:
        writer.write_tensor_data(spool.data(tensor))
    writer.close()


def _type_of(value: Any) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """Type and type of elements. Numbers get the types that llama.cpp's own converter gives them: u32 and f32."""
    from gguf import GGUFValueType as Type

    if isinstance(value, bool):
        return Type.BOOL, None
    if isinstance(value, int):
        if value < 0:
            return (Type.INT32 if value >= -(2**31) else Type.INT64), None
        return (Type.UINT32 if value < 2**32 else Type.UINT64), None
    if isinstance(value, float):
        return Type.FLOAT32, None
    if isinstance(value, str):
        return Type.STRING, None
    if isinstance(value, np.ndarray):
        names = {"f4": "FLOAT32", "f8": "FLOAT64", "b1": "BOOL"}
        code = value.dtype.str[1:]
        name = names.get(code) or f"{'U' if code[0] == 'u' else ''}INT{8 * value.dtype.itemsize}"
        return Type.ARRAY, Type[name]
    return Type.ARRAY, Type.STRING
