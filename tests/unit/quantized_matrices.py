"""Random quantised matrices with the extremes in them, for tests of what stores them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from paceline.weights.quantized_matrix import QuantizedMatrix


def random_matrix(
    seed: int,
    num_outputs: int,
    num_groups: int,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    shuffled: bool = False,
    per_token: bool = False,
) -> QuantizedMatrix:
    """Zero points at both ends, groups of equal codes, scales from 0 over subnormal to large, negative ones too."""
    random = np.random.default_rng(seed)
    num_inputs = num_groups * group
    highest = (1 << bits) - 1
    codes = random.integers(0, highest + 1, (num_outputs, num_inputs), np.uint8)
    codes[0, :group] = random.integers(0, highest + 1)
    scale = random.choice(np.float16([0, 6e-8, 6.1e-5, 0.0123, -0.5, 1, 65504]), (num_outputs, num_groups))
    zero = random.choice(np.uint8([0, 1, 1 << (bits - 1), highest]), (num_outputs, num_groups))
    if symmetric:
        zero[:] = 1 << (bits - 1)
    order = None
    if shuffled:
        groups = random.permutation(np.repeat(np.arange(num_groups), group))
        order = np.argsort(groups, kind="stable").astype(np.int32)
    if per_token:
        scale = (scale.astype(np.float32) * np.float32(1.0001)).astype(np.float32)
    return QuantizedMatrix(codes, scale, zero, bits, group, per_token=per_token, order=order)


def matrices(
    bits: st.SearchStrategy[int],
    outputs: st.SearchStrategy[int],
    *,
    shuffled: bool = False,
    symmetric: st.SearchStrategy[bool] | None = None,
) -> st.SearchStrategy[QuantizedMatrix]:
    """``random_matrix`` over seeds, sizes and kinds."""
    return st.builds(
        random_matrix,
        st.integers(0, 2**32 - 1),
        outputs,
        st.integers(1, 4),
        bits=bits,
        group=st.sampled_from([32, 64, 128]),
        symmetric=st.booleans() if symmetric is None else symmetric,
        shuffled=st.booleans() if shuffled else st.just(False),
    )


def assert_equal(found: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    """The same codes, scales, zero points, order and values."""
    assert (found.bits, found.group, found.per_token) == (expected.bits, expected.group, expected.per_token)
    assert np.array_equal(found.codes, expected.codes)
    assert found.scale.dtype == expected.scale.dtype
    assert np.array_equal(found.scale, expected.scale)
    assert np.array_equal(found.zero, expected.zero)
    # An order that changes nothing need not be there.
    plain = np.arange(found.codes.shape[1])
    assert np.array_equal(
        plain if found.order is None else found.order, plain if expected.order is None else expected.order
    )
    assert np.array_equal(found.values(), expected.values())
