"""The interpreter's ``tl.dot`` that the other tests of this folder rely on."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(x, y, z, SIZE: tl.constexpr):
    i = tl.arange(0, 16)
    j = tl.arange(0, SIZE)
    left = tl.load(x + i[:, None] * SIZE + j[None, :])
    right = tl.load(y + j[:, None] * 16 + i[None, :])
    tl.store(z + i[:, None] * 16 + i[None, :], tl.dot(left, right, input_precision="ieee"))


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [16, size] y [size, 16] in f32."""
    z = torch.empty((16, 16), device=x.device)
    dot_kernel[(1,)](x, y, z, SIZE=x.shape[1])
    return z


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 128])
def test_products(device: torch.device, kind: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x, y = torch.randn(16, size).to(kind).to(device), torch.randn(size, 16).to(kind).to(device)
    exact = x.double() @ y.double()
    assert ((dot(x, y).double() - exact).abs() <= size * 2.0**-24 * (x.double().abs() @ y.double().abs())).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_rows_have_equal_sums(device: torch.device, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1, 128).repeat(16, 1).to(kind).to(device), torch.randn(128, 16).to(kind).to(device)
    z = dot(x, y)
    assert torch.equal(z, z[:1].expand_as(z))
