"""Grids: codes are the nearest, what cannot be represented is met as well as can be, and searching only helps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.quantize.grid import range_grid, searched_grid
from paceline.quantize.rtn import quantize_rtn
from paceline.quantize.scheme import BITS, Scheme

FINITE = st.floats(-1e4, 1e4, width=32)


@given(
    hnp.arrays(np.float32, (3, 64), elements=FINITE),
    st.sampled_from(BITS),
    st.booleans(),
    st.sampled_from([32, 64, None]),
)
@settings(max_examples=200, deadline=None)
def test_every_weight_inside_the_range_is_within_half_a_step(
    W: np.ndarray, bits: int, symmetric: bool, group: int | None
) -> None:
    scheme = Scheme("rtn", bits, group, symmetric)
    matrix = quantize_rtn(W, scheme, scheme.group_of(64, tensor="w"))
    assert matrix.is_symmetric or not symmetric
    assert (matrix.codes < 1 << bits).all()
    scale = np.repeat(matrix.scale.astype(np.float32), matrix.group, axis=1)
    zero = np.repeat(matrix.zero.astype(np.float32), matrix.group, axis=1)
    low, high = -zero * scale, ((1 << bits) - 1 - zero) * scale
    beyond = np.maximum(0, np.maximum(low - W, W - high))
    error = np.abs(matrix.values() - W)
    assert (error <= 0.5 * scale * (1 + 1e-3) + beyond).all()
    # The range is covered but for the rounding of the zero point to a whole number and of the scale to f16, by 2^-11 of
    # itself or half of the smallest f16; the end of the range is up to 2^bits scales away.
    half_step = 0.5 * float(np.finfo(np.float16).smallest_subnormal)
    assert (beyond <= 0.5 * scale + (1 << bits) * np.maximum(2.0**-10 * scale, 1.01 * half_step)).all()


@pytest.mark.parametrize("value", [0.0, 1.5, -1.5, 1e-30])
def test_a_group_of_equal_weights(value: float) -> None:
    W = np.full((2, 32), value, np.float32)
    matrix = quantize_rtn(W, Scheme("rtn", 4, 32), 32)
    np.testing.assert_allclose(matrix.values(), W, rtol=2**-11, atol=1e-7)


def test_the_zero_point_reaches_both_ends() -> None:
    W = np.linspace(0.5, 1.5, 32, dtype=np.float32)[None]
    assert quantize_rtn(W, Scheme("rtn", 4, 32), 32).zero[0, 0] == 0
    assert quantize_rtn(-W, Scheme("rtn", 4, 32), 32).zero[0, 0] == 15


def test_a_scale_beyond_f16_is_cut_and_not_infinite() -> None:
    matrix = quantize_rtn(np.full((1, 32), 1e7, np.float32), Scheme("rtn", 4, 32), 32)
    assert np.isfinite(matrix.values()).all()


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([3, 4]))
@settings(max_examples=40, deadline=None)
def test_a_searched_grid_is_never_worse_and_each_group_is_its_own(seed: int, symmetric: bool, bits: int) -> None:
    rng = np.random.default_rng(seed)
    W = rng.standard_t(3, (4, 64)).astype(np.float32)
    h = rng.uniform(0, 5, 64)
    scheme = Scheme("gptq", bits, 32, symmetric)

    def losses(grid: object) -> np.ndarray:
        error = (W - grid.values(grid.codes(W))) ** 2 * h  # type: ignore[attr-defined]
        return error.reshape(4, -1, 32).sum(axis=2)

    searched = searched_grid(W, scheme, 32, h)
    assert (losses(searched) <= losses(range_grid(W, scheme, 32)) * (1 + 1e-5)).all()
    alone = searched_grid(W[:, 32:], scheme, 32, h[32:])
    np.testing.assert_array_equal(searched.scale[:, 1:], alone.scale)
