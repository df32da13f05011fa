"""Rotary embedding with cosines and sines that are looked up by position."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.config import RopeConfig
from paceline.ops.reference import inverse_frequencies

Turn = tuple[Tensor, Tensor]
"""Of each row: cosines, and sines with the sign that the other one of the pair has, [rows, 1, head_dim] f32."""


class RotationTable:
    """Turns of the positions below a length that grows when it is passed."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies = inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies
        self._stretch = np.where(frequencies > 0, rope.attention_factor, 1.0)
        self._device = device
        self._turn: Turn | None = None

    def turn(self, positions: Tensor, end: int) -> Turn:
        """That of rows at ``positions`` [rows] i64, all below ``end``."""
        if self._turn is None or len(self._turn[0]) < end:
            self._turn = self._table(max(256, 1 << (end - 1).bit_length()))
        cos, sin = self._turn
        return cos[positions], sin[positions]

    def _table(self, length: int) -> Turn:
        angles = np.arange(length)[:, None, None] * self._frequencies
        cos, sin = np.cos(angles) * self._stretch, np.sin(angles) * self._stretch
        pairs = np.repeat(cos, 2, axis=-1), np.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], -1)
        first, second = (torch.from_numpy(table.astype(np.float32)).to(self._device) for table in pairs)
        return first, second


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """The pairs (2i, 2i+1) of x [rows, heads, head_dim], turned."""
    cos, sin = turn
    swapped = x.reshape(*x.shape[:-1], -1, 2).flip(-1).view(x.shape)
    return x * cos + swapped * sin
