"""Hugging Face directories in compressed-tensors', GPTQ's and AWQ's formats.

Scales are f16. What is not quantised stays as it is, see ``tensors.float_tensor``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.quantize.export.config_json import made_generation_config, made_values, source_values
from paceline.quantize.export.formats import is_layer_matrix
from paceline.quantize.export.quantization_config import awq_config, compressed_tensors_config, gptq_config
from paceline.quantize.export.safetensors_files import write_safetensors
from paceline.quantize.export.spool import TensorSpool
from paceline.quantize.export.tensors import float_tensor, half_split_rows, huggingface_name, refuse_order, with_rows
from paceline.quantize.export.tokenizer_files import copy_tokenizer_files, write_tokenizer_files
from paceline.quantize.model import QuantizedModel
from paceline.quantize.scheme import Scheme
from paceline.text.tokenizer import load_tokenizer
from paceline.weights import awq, compressed_tensors, gptq
from paceline.weights.gguf import GGUFCheckpoint
from paceline.weights.planes import pack_rows
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import Checkpoint

KINDS = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int8): "I8",
}


def write_huggingface_directory(model: QuantizedModel, directory: Path, fmt: str) -> None:
    """Makes the directory; ``check_format`` has been asked."""
    directory.mkdir()
    with TensorSpool(directory.parent / "spool") as spool:
        left_alone, has_order = _spool_tensors(model, spool, fmt)
        quantization = _quantization_config(model.scheme, fmt, left_alone, has_order)
        write_small_files(model.checkpoint, directory, quantization)
        write_safetensors(spool, directory, metadata={"format": "pt"})


def write_small_files(checkpoint: Checkpoint, directory: Path, quantization: Mapping[str, Any]) -> None:
    """Configuration, tokenizer and chat template, from the source's files or from a GGUF file's metadata."""
    write_tokenizer(checkpoint, directory)
    values = {} if isinstance(checkpoint, GGUFCheckpoint) else source_values(Path(checkpoint.path))
    if "architectures" not in values:
        values = made_values(checkpoint.config, load_tokenizer(checkpoint))
    write_json(directory / "config.json", {**values, "quantization_config": dict(quantization)})


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """The source's files about the tokenizer and the ends of answers, or what a GGUF file's metadata say of them."""
    if isinstance(checkpoint, GGUFCheckpoint):
        write_tokenizer_files(checkpoint, directory)
        write_json(directory / "generation_config.json", made_generation_config(load_tokenizer(checkpoint)))
    else:
        copy_tokenizer_files(Path(checkpoint.path), directory)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """The object as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _spool_tensors(model: QuantizedModel, spool: TensorSpool, fmt: str) -> tuple[list[str], bool]:
    """Adds all tensors; returns the modules of layers that are not quantised, and whether any has its inputs in another
    order.
    """
    checkpoint = model.checkpoint
    left_alone: list[str] = []
    has_order = False
    for name in checkpoint.names():
        rows = half_split_rows(checkpoint.config, name) if checkpoint.interleaved_rope else None
        theirs = huggingface_name(name)
        module = theirs.removesuffix(".weight")
        matrix = model.matrix(name)
        if matrix is None:
            if is_layer_matrix(name):
                left_alone.append(module)
            plain = float_tensor(model, name)
            data = plain.data if rows is None else plain.data[rows]
            spool.add(theirs, plain.kind, data.shape, data)
            continue
        if matrix.order is not None and fmt != "gptq":
            refuse_order(fmt, name)  # compressed-tensors had a plane for it and gave it up
        has_order = has_order or matrix.order is not None
        for plane, array in _planes(with_rows(matrix, rows), model.scheme, fmt).items():
            spool.add(f"{module}.{plane}", KINDS[array.dtype], array.shape, array)
    return left_alone, has_order


def _planes(matrix: QuantizedMatrix, scheme: Scheme, fmt: str) -> dict[str, NDArray[Any]]:
    if fmt == "gptq":
        return gptq.pack(matrix)
    if fmt == "awq":
        return awq.pack(matrix)
    if matrix.per_token:
        return compressed_tensors.pack_int8(matrix)
    planes = compressed_tensors.pack(matrix)
    if not scheme.symmetric and "weight_zero_point" not in planes:
        # By chance all zero points are the middle one; the configuration still announces some.
        zero = pack_rows(np.ascontiguousarray(matrix.zero.T), matrix.bits)
        planes["weight_zero_point"] = np.ascontiguousarray(zero.T)
    return planes


def _quantization_config(scheme: Scheme, fmt: str, left_alone: list[str], has_order: bool) -> dict[str, Any]:
    if fmt == "gptq":
        return gptq_config(scheme, left_alone=left_alone, has_order=has_order)
    if fmt == "awq":
        return awq_config(scheme, left_alone=left_alone)
    return compressed_tensors_config(scheme, left_alone=left_alone)
