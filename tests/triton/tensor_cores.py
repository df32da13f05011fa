"""``tl.dot`` for Triton's interpreter as a tensor core has it: rows summed alike, wherever in the tile they are.

The interpreter of Triton 3.7.1 hands tiles to BLAS, whose sums depend on where in the matrix a row lies, and takes the
bits of a bf16 for an integer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter


def as_f32(handle: Any) -> NDArray[np.float32]:
    """The numbers of a tile; the interpreter keeps a bf16 as its bits."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(handle.data, np.float32)


def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """d + a b: products in f32, where those of 16-bit numbers are exact, summed in order."""
    assert d.dtype.scalar == tl.float32, d.dtype
    product = np.add.reduce(as_f32(a)[:, :, None] * as_f32(b)[None], axis=1)
    return interpreter.TensorHandle(product + d.data, tl.float32)


def install() -> None:
    """For this process."""
    interpreter.InterpreterBuilder.create_dot = create_dot
