"""What the torch executor runs on a GPU with Triton: products with 4-bit codes, attention that reads pages in place.

Checked by: tests/triton/test_torch_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.config import ModelConfig
from paceline.executors.torch.attention import PagedAttention, Sequences, SplitAttention
from paceline.executors.torch.cuda_graphs import CudaRecorder, Recording
from paceline.executors.torch.kernels import Kernels
from paceline.executors.torch.pages import PagePool
from paceline.executors.torch.products import Product, ProductMaker
from paceline.executors.torch.rows import Rows
from paceline.executors.triton.attention_rows import AttentionRows
from paceline.executors.triton.gemv_int4 import Int4Matrix, gemv_int4
from paceline.executors.triton.int4_layout import pack_affine
from paceline.executors.triton.paged_attention import paged_attention
from paceline.weights.packed import PackedMatrix
from paceline.weights.tiling import unpack_groups

SCRATCH_BYTES = 256 << 20
"""Of the partial results of attention: rows are computed in pieces that need no more."""


def triton_kernels(model: ModelConfig, device: torch.device) -> Kernels:
    """Those of Triton where it has any, else torch's; decode steps are recorded on a GPU."""
    attention = TritonAttention(SplitAttention.measured(model.head_dim, device))
    recording = Recording(CudaRecorder(device), paged_attention) if device.type == "cuda" else None
    return Kernels(TritonProducts(device), attention, "triton", recording)


class TritonProducts:
    """Makes products; see ``products.MakeProduct``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._others = ProductMaker(device)

    def __call__(self, matrices: Sequence[PackedMatrix], dtype: torch.dtype) -> Product:
        """That of matrices whose outputs lie side by side."""
        parts = [self._one(matrix, dtype) for matrix in matrices]
        if len(parts) == 1:
            return parts[0]
        num_bytes = sum(part.num_bytes for part in parts)
        return Product(lambda x: torch.cat([part(x) for part in parts], dim=-1), num_bytes, Rows())

    def _one(self, matrix: PackedMatrix, dtype: torch.dtype) -> Product:
        if matrix.format.kind != "u4":
            return self._others([matrix], dtype)
        packed = Int4Matrix.of(pack_affine(unpack_groups(matrix), matrix.name, matrix.order), self._device)
        return Product(lambda x: gemv_int4(x, packed), packed.num_bytes, Rows())


class TritonAttention:
    """``attention.PagedAttention`` that reads pages where they are; int8 pages are left to ``others``."""

    def __init__(self, others: PagedAttention) -> None:
        self._others = others
        self._sequences: Sequences | None = None
        self._pieces: list[tuple[slice, AttentionRows]] = []

    def __call__(
        self,
        q: Tensor,
        pool: PagePool,
        layer: int,
        sequences: Sequences,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """softmax(q K^T) V of each row over what it sees."""
        if pool.scales is not None:
            return self._others(q, pool, layer, sequences, window=window, softcap=softcap, sinks=sinks)
        if self._sequences is not sequences:  # another step; its layers all have these rows
            self._sequences, self._pieces = sequences, pieces_of(sequences, pool.model)
        keys, values = pool.numbers[:, layer, 0], pool.numbers[:, layer, 1]
        found = [
            paged_attention(q[piece], keys, values, rows, window=window, softcap=softcap, sinks=sinks)
            for piece, rows in self._pieces
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


def pieces_of(sequences: Sequences, model: ModelConfig) -> list[tuple[slice, AttentionRows]]:
    """The rows of a step in pieces whose partial results take at most ``SCRATCH_BYTES`` (or are one row's)."""
    num_rows, group = len(sequences.positions), model.num_heads // model.num_kv_heads

    def piece(begin: int, end: int) -> AttentionRows:
        starts = np.clip(sequences.row_starts, begin, end) - np.int32(begin)
        positions = sequences.positions[begin:end]
        return AttentionRows.of(positions, starts, sequences.page_table, group=group, device=sequences.device)

    whole = piece(0, num_rows)
    height = max(1, SCRATCH_BYTES // (4 * model.num_heads * whole.max_splits * model.head_dim))
    if num_rows <= height:
        return [(slice(0, num_rows), whole)]
    bounds = [(begin, min(num_rows, begin + height)) for begin in range(0, num_rows, height)]
    return [(slice(begin, end), piece(begin, end)) for begin, end in bounds]
