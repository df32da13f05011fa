"""Products of f32 numbers and 16-bit ones on tensor cores, which multiply 16-bit numbers only.

Source: the splitting of Ozaki et al. (2012), "Error-free transformations of matrix multiplication", with a fixed number
of terms.

Notation: x [M, K] f32, y [K, N] of a 16-bit type, x = x_1 + x_2 + ...: x_1 is x rounded to y's type, x_2 what that
left out, rounded likewise, and so on.

Every product of two 16-bit numbers is exact in f32. Three terms of bf16 hold all 24 bits of an f32 (but for numbers
below 2^-110), two of f16 hold 22 of them, and magnitudes from 2^-25 to 65504 only.

Departures: none.

Checked by: tests/triton/test_split_dot.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_dot(x, y, acc, TERMS: tl.constexpr):
    """acc + x y [M, N] f32, x [M, K] f32 as ``TERMS`` numbers of y's type, the largest ones first.

    y may be f32 too; then one term is x itself, and the product runs outside the tensor cores.
    """
    for _ in tl.static_range(TERMS):
        term = x.to(y.dtype)
        acc = tl.dot(term, y, acc, input_precision="ieee")
        x = x - term.to(tl.float32)
    return acc
