"""How many rows a product is given at a time, so that a row's bits do not depend on the rows beside it.

The promise is the native executor's: an element's sum has one order, whatever the number of rows. PyTorch makes no such
promise: its libraries choose a kernel by the shape. So it is tried when the executor is loaded, on the kernels and the
threads that will run (``steady_rows``): does a row have the same bits in products of 1, 2, 3, ... rows, wherever it
stands? If not, from 4 rows on? From 16? If neither, every product takes exactly 16 rows. What is missing is padded,
what is more is cut.

Measured with torch 2.13 on AVX2: oneDNN's packed float32 product has one order for any number of rows; MKL's sgemm,
plain and batched, has one from 4 rows on and others for 1 and for 2 or 3; products in bfloat16 have one. On CUDA
nothing is tried: cuBLAS chooses among dozens of kernels by the number of rows, and blocks of 16 would cost most of a
prefill's speed. There the promise is not made, and ``paceline verify`` says which paths differ.

Checked by: tests/unit/test_torch_rows.py, tests/native/test_torch_executor.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

COUNTS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64)
"""Numbers of rows that are tried."""

BLOCK = 16

Rowwise = Callable[[Tensor], Tensor]
"""x [rows, inputs] -> [rows, outputs], each row by itself but for the order of its sums."""


@dataclass(frozen=True)
class Rows:
    """The numbers of rows with one order of sums: ``least`` and more, at most ``most`` (None: no bound)."""

    least: int = 1
    most: int | None = None

    @property
    def are_any(self) -> bool:
        """Whether nothing is to be padded or cut."""
        return self.least == 1 and self.most is None

    def apply(self, product: Rowwise, x: Tensor) -> Tensor:
        """product(x), padded and cut into such numbers of rows."""
        count = len(x)
        if count >= self.least and (self.most is None or count <= self.most):
            return product(x)
        if count < self.least:
            padded = x.new_zeros((self.least, x.shape[1]))
            padded[:count] = x
            return product(padded)[:count]
        assert self.most is not None
        return torch.cat([self.apply(product, part) for part in x.split(self.most)])


def steady_rows(product: Rowwise, num_inputs: int, *, device: torch.device) -> Rows:
    """The widest ``Rows`` in which ``product``, a function of rows alone, gives each row the same bits."""
    if device.type != "cpu":
        return Rows()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(COUNTS), num_inputs), generator=generator)
    for rows in (Rows(), Rows(4), Rows(BLOCK)):
        if _is_steady(product, x, [count for count in COUNTS if count >= rows.least]):
            return rows
    return Rows(BLOCK, BLOCK)


def _is_steady(product: Rowwise, x: Tensor, counts: list[int]) -> bool:
    whole = product(x)
    return all(
        torch.equal(product(x[begin : begin + count].clone()), whole[begin : begin + count])
        for count in counts
        for begin in {0, len(x) - count}
    )
