"""Random matrices with 4-bit codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import BLOCK_KINDS, RawTensor


def quantized(outputs: int, inputs: int, group: int, *, bits: int = 4, zero: int | None = None) -> QuantizedMatrix:
    """Random codes and scales; zero points at random, or all the same."""
    rng = np.random.default_rng(outputs + inputs + group + bits)
    codes = rng.integers(0, 1 << bits, (outputs, inputs), np.uint8)
    scale = rng.normal(0, 0.01, (outputs, inputs // group)).astype(np.float16)
    zeros = rng.integers(0, 1 << bits, scale.shape, np.uint8) if zero is None else np.full(scale.shape, zero, np.uint8)
    return QuantizedMatrix(codes, scale, zeros, bits, group)


def gguf(kind: str, outputs: int, inputs: int) -> RawTensor:
    """Random blocks with finite scales."""
    rng = np.random.default_rng(outputs)
    weights, num_bytes = BLOCK_KINDS[kind]
    blocks = rng.integers(0, 256, (outputs * inputs // weights, num_bytes), np.uint8)
    halves: NDArray[np.float16] = rng.normal(0, 0.01, (len(blocks), 2)).astype(np.float16)
    blocks[:, : 2 if kind == "Q4_0" else 4] = halves.view(np.uint8)[:, : 2 if kind == "Q4_0" else 4]
    return RawTensor("w", (outputs, inputs), kind, blocks.reshape(-1))
