"""Embeddings and head in the formats that can hold them quantised, gguf and paceline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig
from paceline.quantize.export.tensors import F32, finite_values, unchanged
from paceline.quantize.model import QuantizedModel
from paceline.weights.blocks import AffineGroups, f32_to_f16, quantize_rtn
from paceline.weights.raw import RawTensor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
GROUP = 32
GGUF_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Kinds that GGUF files have too; the others are those of ``weights/quantized_matrix.py``."""


def head_tensor(model: QuantizedModel, name: str, *, head_bits: int | None, default_bits: int | None) -> RawTensor:
    """The embedding or the head of a model, in blocks or as floats.

    ``head_bits`` is for the matrix that gives the logits (tied embeddings are it): 16 is F16, 8 Q8_0, 4 Q4_1, rounded
    to nearest. Without it, and for embeddings that are no head, what the source holds stays to the byte if it is in
    blocks of GGUF files or ``default_bits`` is None; else it gets ``default_bits`` where 32 divides its inputs.
    """
    values = finite_values(model, name)
    raw = unchanged(model, name, values)
    bits = head_bits if name == head_name(model.checkpoint.config) else None
    if bits is None:
        if raw is not None and (default_bits is None or (raw.kind in GGUF_BLOCKS and raw.order is None)):
            return raw
        bits = default_bits if default_bits is not None and values.shape[1] % GROUP == 0 else 16
    return rounded_tensor(name, values, bits)


def head_name(config: ModelConfig) -> str:
    """The matrix that gives the logits."""
    return EMBEDDING if config.tie_embeddings else HEAD


def rounded_tensor(name: str, values: F32, bits: int) -> RawTensor:
    """F16, Q8_0 or Q4_1 of ``values`` [N, K], rounded to nearest."""
    if bits == 16:
        if float(np.abs(values).max()) > np.finfo(np.float16).max:
            return RawTensor(name, values.shape, "F32", np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8))
        return RawTensor(name, values.shape, "F16", values.astype("<f2").reshape(-1).view(np.uint8))
    groups = quantize_rtn(values, "int8" if bits == 8 else "int4", group=GROUP)
    kind = "Q8_0" if bits == 8 else "Q4_1"
    return RawTensor(name, values.shape, kind, _q8_0(groups) if bits == 8 else _q4_1(groups))


def _q8_0(groups: AffineGroups) -> NDArray[np.uint8]:
    codes = groups.q.reshape(-1, GROUP).view(np.uint8)
    return np.concatenate([_halves(groups.scale), codes], axis=1).reshape(-1)


def _q4_1(groups: AffineGroups) -> NDArray[np.uint8]:
    assert groups.minimum is not None
    return q4_1_blocks(groups.q.view(np.uint8), groups.scale, groups.minimum)


def q4_1_blocks(codes: NDArray[np.uint8], scale: F32, minimum: F32) -> NDArray[np.uint8]:
    """Q4_1 blocks of codes [N, K] with w = scale * code + minimum, both rounded to f16 [N, K / 32]."""
    runs = codes.reshape(-1, 2, GROUP // 2)
    nibbles = runs[:, 0] | (runs[:, 1] << np.uint8(4))
    return np.concatenate([_halves(scale), _halves(minimum), nibbles], axis=1).reshape(-1)


def _halves(values: F32) -> NDArray[np.uint8]:
    return f32_to_f16(values).astype("<u2").reshape(-1, 1).view(np.uint8)
