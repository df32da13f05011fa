"""Products of a few rows with 4-bit weights, bound by reading the weights once.

Source: Frantar et al. 2408.11743 (MARLIN), for tensor cores under a weight-bound product; split-K as in Hoque et al.
2402.00025. The layout is this project's (``int4_layout.py``).

Notation: X [M, K] activations, W [N, K] weights, y = X W^T; q codes, s scales and o offsets of groups of G inputs. A
program computes 16 rows by ``BLOCK_OUTPUTS`` outputs over one of ``num_splits`` ranges of inputs.

Codes become floats without a conversion, of which a multiprocessor does few at a time: the bits 0x4B000000 | q are the
f32 2^23 + q. Taking off 2^23 and the zero point leaves q - o, which 16 bits hold exactly. A group's product with them
is summed in f32 and only then multiplied by its scale, so no weight is rounded. f32 activations are three terms of bf16
(``split_dot.py``).

The order of every sum follows from N, K and G alone: sixteen inputs in one tensor-core product, those of a group one
after the other, groups and blocks in order, splits left to right. All rows run in tiles of 16, also a single one, so a
row has the same bits alone and among others.

Departures: MARLIN's asynchronous pipeline is left to Triton, and its split-K by locks is a second kernel.

Checked by: tests/triton/test_gemv_int4.py (in the interpreter, or compiled where there is a GPU),
tests/triton/test_compiled.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.executors.triton.int4_layout import BLOCK_INPUTS, OffsetKind, PackedInt4
from paceline.executors.triton.split_dot import split_dot

TILE_ROWS = 16
"""What one tensor-core product has."""
BLOCK_OUTPUTS = 32
MIN_PROGRAMS = 128
"""Fewer leave multiprocessors idle (an A100 has 108, an H100 132): then inputs are split. Not tuned on a GPU yet."""
MIN_SPLIT_BLOCKS = 4
"""Blocks of 128 inputs that are worth a split."""


@dataclass(frozen=True)
class Int4Matrix:
    """``PackedInt4`` on a device."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    offset_kind: OffsetKind
    group: int
    num_outputs: int
    num_inputs: int
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, packed: PackedInt4, device: torch.device | str) -> Int4Matrix:
        """A copy on that device."""
        return cls(
            torch.from_numpy(packed.codes).to(device),
            torch.from_numpy(packed.scale).to(device),
            None if packed.offset is None else torch.from_numpy(packed.offset).to(device),
            packed.offset_kind,
            packed.group,
            packed.num_outputs,
            packed.num_inputs,
            None if packed.order is None else torch.from_numpy(packed.order).to(device),
        )

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        tensors = [self.codes, self.scale] + ([] if self.offset is None else [self.offset])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def num_splits(num_outputs: int, num_inputs: int) -> int:
    """Ranges of inputs that are summed apart: a function of the matrix's shape, so that sums do not depend on the
    batch.
    """
    programs = -(-num_outputs // BLOCK_OUTPUTS)
    blocks = -(-num_inputs // BLOCK_INPUTS)
    return max(1, min(-(-MIN_PROGRAMS // programs), blocks // MIN_SPLIT_BLOCKS))


def gemv_int4(
    x: torch.Tensor, matrix: Int4Matrix, *, bias: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """(x W^T + bias) * scale [rows, outputs] in the type of x [rows, inputs]: f16, bf16 or f32.

    Any number of rows is right; above 16 the weights are read again for each 16.
    """
    assert x.ndim == 2, x.shape
    assert x.shape[1] == matrix.num_inputs, (x.shape, matrix.num_inputs)
    assert matrix.codes.numel() < 2**31, "places of codes are 32-bit integers"
    assert x.dtype in (torch.float16, torch.bfloat16, torch.float32), x.dtype
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    x = x.contiguous()
    rows, outputs = x.shape[0], matrix.num_outputs
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    splits = num_splits(outputs, matrix.num_inputs)
    blocks = triton.cdiv(matrix.num_inputs, BLOCK_INPUTS)
    partial = y if splits == 1 else torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    product_kernel[(triton.cdiv(outputs, BLOCK_OUTPUTS), splits, triton.cdiv(rows, TILE_ROWS))](
        x,
        matrix.codes,
        matrix.scale,
        matrix.scale if matrix.offset is None else matrix.offset,
        y if bias is None else bias,
        partial,
        rows,
        outputs,
        matrix.num_inputs,
        triton.cdiv(blocks, splits),
        scale,
        GROUP=matrix.group,
        OFFSET=matrix.offset_kind,
        FACTOR_TYPE=tl.float16 if x.dtype == torch.float16 else tl.bfloat16,
        TERMS=3 if x.dtype == torch.float32 else 1,
        IS_EVEN=matrix.num_inputs % BLOCK_INPUTS == 0,
        IS_WHOLE=splits == 1,
        HAS_BIAS=bias is not None,
        TILE_ROWS=TILE_ROWS,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        num_stages=4,
    )
    if splits > 1:
        merge_kernel[(rows, triton.cdiv(outputs, 256))](
            partial,
            y if bias is None else bias,
            y,
            rows * outputs,
            outputs,
            scale,
            SPLITS=splits,
            HAS_BIAS=bias is not None,
            BLOCK=256,
        )
    return y


@triton.jit
def product_kernel(
    x,
    codes,
    scales,
    offsets,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    split_blocks,
    factor,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR_TYPE: tl.constexpr,
    TERMS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Sums of one split, f32 [splits, rows, outputs]; with ``IS_WHOLE`` the finished product [rows, outputs].

    Grid: blocks of outputs, splits, tiles of rows.
    """
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    lanes = tl.arange(0, 16)
    split = tl.program_id(1)
    num_blocks = tl.cdiv(num_inputs, 128)
    # Rows and outputs that are not there are read as the last ones and not stored: masks would cost more than products.
    from_rows = x + tl.minimum(rows, num_rows - 1)[:, None] * num_inputs
    from_outputs = tl.minimum(outputs, num_outputs - 1)
    ones = tl.full((16, BLOCK_OUTPUTS), 1.0, tl.float32).to(FACTOR_TYPE)  # what is multiplied with them is summed
    acc = tl.zeros((TILE_ROWS, BLOCK_OUTPUTS), tl.float32)
    for block in range(split * split_blocks, tl.minimum((split + 1) * split_blocks, num_blocks)):
        words = tl.load(codes + (block * num_outputs + from_outputs[None, :]) * 16 + lanes[:, None])
        for group in tl.static_range(128 // GROUP):
            at = (block * (128 // GROUP) + group) * num_outputs + from_outputs
            scale = tl.load(scales + at).to(tl.float32)
            part = tl.zeros((TILE_ROWS, BLOCK_OUTPUTS), tl.float32)
            total = tl.zeros((TILE_ROWS, BLOCK_OUTPUTS), tl.float32)
            zero = tl.full((1, BLOCK_OUTPUTS), 0.0 if OFFSET == "minimum" else 8.0, tl.float32)
            if OFFSET == "zero":
                zero = tl.load(offsets + at).to(tl.float32)[None, :]
            for piece in tl.static_range(GROUP // 16):
                nibble = group * (GROUP // 16) + piece
                inputs = block * 128 + nibble * 16 + lanes
                if IS_EVEN:
                    values = tl.load(from_rows + inputs[None, :]).to(tl.float32)
                else:
                    values = tl.load(from_rows + inputs[None, :], mask=inputs[None, :] < num_inputs, other=0.0)
                    values = values.to(tl.float32)
                q = centre((words >> (4 * nibble)) & 15, zero, FACTOR_TYPE)
                part = split_dot(values, q, part, TERMS)
                if OFFSET == "minimum":
                    total = split_dot(values, ones, total, TERMS)
            acc += part * scale[None, :]
            if OFFSET == "minimum":
                acc += total * tl.load(offsets + at).to(tl.float32)[None, :]
    is_inside = (rows[:, None] < num_rows) & (outputs[None, :] < num_outputs)
    if IS_WHOLE:
        if HAS_BIAS:
            acc += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
        acc = acc * factor
    at = (split.to(tl.int64) * num_rows + rows[:, None]) * num_outputs + outputs[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def centre(q, zero, TYPE: tl.constexpr):
    """q - zero in that 16-bit type; q i32 and zero f32 are integers 0 to 15, so every step is exact."""
    raised = (q | 0x4B000000).to(tl.float32, bitcast=True)
    return (raised - (zero + 8388608.0)).to(TYPE)


@triton.jit
def merge_kernel(
    partial,
    bias,
    y,
    split_stride,
    num_outputs,
    factor,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The splits' sums, left to right, then bias and factor. Grid: rows, blocks of outputs."""
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = outputs < num_outputs
    at = tl.program_id(0).to(tl.int64) * num_outputs + outputs
    total = tl.load(partial + at, mask=is_inside, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        partial += split_stride
        total += tl.load(partial + at, mask=is_inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + at, (total * factor).to(y.dtype.element_ty), mask=is_inside)
