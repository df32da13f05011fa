"""How many rows a product may have for each row to keep its bits, found by trying; and the products of torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.executors.torch.products import ProductMaker
from paceline.executors.torch.rows import BLOCK, Rows, steady_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Fickle:
    """Twice its input, and a little more that depends on how many rows there are: none from ``steady_from`` on."""

    def __init__(self, steady_from: int) -> None:
        self.steady_from = steady_from
        self.counts: set[int] = set()

    def __call__(self, x: Tensor) -> Tensor:
        self.counts.add(len(x))
        return 2 * x + (len(x) * 1e-3 if len(x) < self.steady_from else 0.0)


@pytest.mark.parametrize(
    ("steady_from", "rows"), [(1, Rows()), (2, Rows(4)), (4, Rows(4)), (5, Rows(16)), (40, Rows(BLOCK, BLOCK))]
)
def test_the_widest_range_that_is_steady_is_found(steady_from: int, rows: Rows) -> None:
    assert steady_rows(Fickle(steady_from), 3, device=CPU) == rows


@pytest.mark.parametrize("rows", [Rows(), Rows(4), Rows(BLOCK, BLOCK), Rows(2, 5)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_rows_are_padded_and_cut(rows: Rows, count: int) -> None:
    product = Fickle(0)
    x = torch.arange(3.0 * count).reshape(count, 3)
    assert torch.equal(rows.apply(product, x), 2 * x)
    assert min(product.counts) >= rows.least
    assert rows.most is None or max(product.counts) <= rows.most


def test_blocks_give_a_row_the_same_bits_in_any_company() -> None:
    """With a product that no range of rows makes steady."""
    x, product = torch.randn((40, 3)), Fickle(10**9)
    rows = steady_rows(product, 3, device=CPU)
    whole = rows.apply(product, x)
    assert all(torch.equal(rows.apply(product, x[at : at + 1]), whole[at : at + 1]) for at in range(40))
    assert not torch.equal(product(x[:1]), product(x)[:1]), "else the padding would prove nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 64), (37, 100), (576, 1536), (75, 16), (4, 4096)])
def test_products_of_torch_have_one_order_of_sums(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(num_inputs)
    values = generator.standard_normal((num_outputs, num_inputs)).astype(np.float32)
    x = torch.from_numpy(generator.standard_normal((130, num_inputs)).astype(np.float32))
    with torch.inference_mode():
        torch.set_num_threads(2)
        product = ProductMaker(CPU).of_values(values, dtype)
        whole = product(x)
        exact = x.to(dtype).double() @ torch.from_numpy(values).to(dtype).double().T
        # n eps sum |x||w| for any order (Higham 2002, 3.1), and the rounding of the result.
        terms = x.abs().double() @ torch.from_numpy(values).abs().double().T
        eps = 2.0**-24 if dtype == torch.float32 else 2.0**-8
        assert ((whole - exact).abs() <= (num_inputs * 2.0**-24 + 2.0**-23) * terms * 1.1 + eps * exact.abs()).all()
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for begin, count in ((0, 1), (129, 1), (5, 2), (3, 3), (50, 4), (7, 31), (0, 64), (20, 110), (0, 130)):
                assert torch.equal(product(x[begin : begin + count]), whole[begin : begin + count])
