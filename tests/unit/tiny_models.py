"""Tiny random checkpoints in memory, in every tensor kind, made without torch and without a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig, RopeConfig
from paceline.errors import CheckpointError
from paceline.weights.blocks import dequantize, f32_to_bf16
from paceline.weights.inventory import expected_shapes
from paceline.weights.packing import is_matrix
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import BLOCK_KINDS, Checkpoint, RawTensor, TensorHeader

K_QUANT_SCALES = {
    # kind: (where the f16 scale is, its size, where the f16 minimum is, its size): values centred, deviation about 1/16
    "Q4_K": (0, 2.5e-4, 2, 7.5 * 2.5e-4),
    "Q5_K": (0, 1.2e-4, 2, 15.5 * 1.2e-4),
    "Q6_K": (208, 4.6e-5, None, 0.0),
}


@dataclass
class MemoryCheckpoint:
    """A checkpoint whose tensors are arrays; what the executors see of a file."""

    config: ModelConfig
    tensors: dict[str, RawTensor]
    interleaved_rope: bool = True
    path: str = field(default="memory")

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def header(self, name: str) -> TensorHeader:
        raw = self.tensor(name)
        return TensorHeader(raw.shape, raw.kind)

    def tensor(self, name: str) -> RawTensor:
        if name not in self.tensors:
            raise CheckpointError(self.path, "missing", tensor=name)
        return self.tensors[name]


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, four query heads over two of 16 components, a vocabulary that is no multiple of a tile."""
    config = ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=75,
        context_length=1024,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0, 16),
        tie_embeddings=True,
    )
    return replace(config, **changes)


def tiny_checkpoint(
    config: ModelConfig, kind: str = "F32", *, kinds: dict[str, str] | None = None, seed: int = 0
) -> MemoryCheckpoint:
    """Random weights of unit gain. ``kinds`` gives single tensors, by the end of their name, another kind."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        chosen = next((other for end, other in (kinds or {}).items() if name.endswith(end)), kind)
        values = rng.standard_normal(shape).astype(np.float32)
        if not is_matrix(name, shape):
            values = values * np.float32(0.2) + np.float32(1.0 if "norm" in name else 0.0)
            chosen = "F32"
        elif name != "token_embd.weight":
            values /= np.float32(np.sqrt(shape[-1]))
        tensors[name] = RawTensor(name, shape, chosen, encode(values.reshape(-1, shape[-1]), chosen, rng))
    return MemoryCheckpoint(config, tensors)


def encode(values: NDArray[np.float32], kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The bytes of ``values`` in that kind. K-quants, which gguf cannot write, are random blocks instead."""
    if kind in K_QUANT_SCALES:
        block, block_bytes = BLOCK_KINDS[kind]
        blocks = rng.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
        scale_at, scale, minimum_at, minimum = K_QUANT_SCALES[kind]
        blocks[:, scale_at : scale_at + 2] = np.array([scale], np.float16).view(np.uint8)
        if minimum_at is not None:
            blocks[:, minimum_at : minimum_at + 2] = np.array([minimum], np.float16).view(np.uint8)
        return blocks.reshape(-1)
    if kind == "Q8C" or kind[2:3] == "G":
        return quantized(values, kind).blocks("t").data
    if kind == "BF16":
        return f32_to_bf16(values).reshape(-1).view(np.uint8)
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16).reshape(-1).view(np.uint8)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(-1).view(np.uint8)


def quantized(values: NDArray[np.float32], kind: str, order: NDArray[np.int32] | None = None) -> QuantizedMatrix:
    """A matrix [N, K] rounded to a kind of quantised checkpoints; with ``order`` its columns lie in that order.

    Kinds with zero points get those of the group's range, which always holds 0.
    """
    per_token, has_zero = kind == "Q8C", kind.endswith("Z")
    bits = int(kind[1])
    group = values.shape[1] if per_token else int(kind.removesuffix("Z")[3:])
    columns = values if order is None else values[:, order]
    grouped = columns.reshape(len(columns), -1, group).astype(np.float64)
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    if has_zero:
        low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
        scale = (high - low) / top
        zero = np.rint(-low / np.where(scale > 0, scale, 1)).clip(0, top)
        if (zero == middle).all():
            zero[0, 0] -= 1  # or it would be the kind without zero points
    else:
        scale = np.abs(grouped).max(axis=2) / (middle - 1)
        zero = np.full(scale.shape, middle)
    stored = scale.astype(np.float32 if per_token else np.float16)
    divisor = np.where(stored > 0, stored, 1).astype(np.float64)[:, :, None]
    codes = np.rint(grouped / divisor + zero[:, :, None]).clip(0, top).reshape(values.shape)
    return QuantizedMatrix(
        codes.astype(np.uint8), stored, zero.astype(np.uint8), bits, group, per_token=per_token, order=order
    )


def changed(checkpoint: MemoryCheckpoint, name: str, at: int, byte: int) -> MemoryCheckpoint:
    """A copy in which one byte of one tensor is another."""
    raw = checkpoint.tensors[name]
    data = raw.data.copy()
    assert data[at] != byte
    data[at] = byte
    return replace(checkpoint, tensors=checkpoint.tensors | {name: replace(raw, data=data)})


def as_f32(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, NDArray[np.float32]]:
    """The tensors' values; vectors as rows of one."""
    raws = [checkpoint.tensor(name) for name in names]
    return {raw.name: dequantize(raw if len(raw.shape) == 2 else replace(raw, shape=(1, *raw.shape))) for raw in raws}
