"""Sums of 16-bit terms hold what they promise of an f32."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from paceline.executors.triton.split_dot import split_dot


@triton.jit
def product_kernel(x, y, out, TERMS: tl.constexpr):
    i = tl.arange(0, 16)
    left = tl.load(x + i[:, None] * 16 + i[None, :])
    right = tl.load(y + i[:, None] * 16 + i[None, :])
    product = split_dot(left, right, tl.zeros((16, 16), tl.float32), TERMS)
    tl.store(out + i[:, None] * 16 + i[None, :], product)


def times_identity(x: torch.Tensor, kind: torch.dtype, terms: int) -> torch.Tensor:
    """x as the terms hold it."""
    out = torch.empty_like(x)
    product_kernel[(1,)](x, torch.eye(16, dtype=kind, device=x.device), out, TERMS=terms)
    return out


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    """Magnitudes from 1e-3 to 1e3, f32."""
    torch.manual_seed(0)
    return (torch.randn(16, 16) * 10 ** (6 * torch.rand(16, 16) - 3)).to(device)


def test_three_terms_of_bf16_are_an_f32(x: torch.Tensor) -> None:
    assert torch.equal(times_identity(x, torch.bfloat16, 3), x)


@pytest.mark.parametrize(
    ("kind", "terms", "bits"), [(torch.bfloat16, 1, 8), (torch.bfloat16, 2, 16), (torch.float16, 1, 11)]
)
def test_fewer_terms_are_rounded(x: torch.Tensor, kind: torch.dtype, terms: int, bits: int) -> None:
    """To nearest; the interpreter cuts bf16 off."""
    relative = ((times_identity(x, kind, terms) - x).abs() / x.abs()).max()
    bits -= kind == torch.bfloat16 and x.device.type == "cpu"
    assert 2.0 ** -(bits + 3) < relative <= 2.0**-bits


def test_two_terms_of_f16(x: torch.Tensor) -> None:
    error = (times_identity(x, torch.float16, 2) - x).abs()
    assert (error <= torch.maximum(x.abs() * 2.0**-22, torch.tensor(2.0**-25))).all()


def test_an_f32_factor_is_taken_as_it_is(x: torch.Tensor) -> None:
    assert torch.equal(times_identity(x, torch.float32, 1), x)
