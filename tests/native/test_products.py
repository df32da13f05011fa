"""The product of every packed format with int8 activations, bit for bit against its definition in numpy, one linear
record at a time.

The definition: runs of 32 inputs in order; of each an exact integer sum, then one fused multiply-add with the product
of both scales (and one with the minimum). A fused f32 multiply-add is a longdouble product and sum rounded once: its
24-bit factors give 48 bits, and 64 leave room for the sum of numbers of any size that matter here.
"""

from __future__ import annotations

import numpy as np
import pytest
from bare_program import begin_step, new_program
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_matrices import fma, packed, random_groups, random_rows

from paceline import _native
from paceline.ops.reference import Rounding, quantise_activations, rounded_activations
from paceline.weights.blocks import MXFP4_DOUBLED, AffineGroups
from paceline.weights.packed import CHOSEN_FORMATS, NATIVE_FORMATS, RUN, PackedFormat, PackedMatrix

F32 = NDArray[np.float32]
ISAS = _native.isas()
FORMATS = sorted({fmt for fmt in [*NATIVE_FORMATS.values(), *CHOSEN_FORMATS.values()] if fmt.group}, key=str)


def defined_product(groups: AffineGroups, fmt: PackedFormat, x: F32) -> F32:
    """[rows, outputs] by the definition at the top of the file."""
    num_inputs = groups.q.shape[1]
    q, scale = quantise_activations(x, group=num_inputs if fmt.per_token else RUN)
    q = q.astype(np.int64)
    codes = (groups.q if groups.levels is None else groups.levels[groups.q]).astype(np.int64)
    if fmt.per_token:
        return (q @ codes.T).astype(np.float32) * (groups.scale.T * scale)
    if fmt.offset == "zero":
        codes = codes - np.repeat(groups.zero, fmt.group, axis=1)[:, :num_inputs]
    elif fmt.offset == "none" and fmt.kind == "u4":
        codes = codes - 8
    acc = np.zeros((len(x), len(codes)), np.float32)
    run = min(fmt.group, RUN)
    for first in range(0, num_inputs, run):
        at, group = slice(first, first + run), first // fmt.group
        activation_scale = scale[:, first // RUN, None]
        dot = (q[:, at] @ codes[:, at].T).astype(np.float32)
        acc = fma(dot, groups.scale[:, group] * activation_scale, acc)
        if fmt.offset == "min":
            total = activation_scale * q[:, at].sum(axis=1, keepdims=True).astype(np.float32)
            acc = fma(groups.minimum[:, group], total, acc)
    return acc


def native_product(isa: str, matrix: PackedMatrix, x: F32, *, num_threads: int = 1) -> F32:
    """[rows, outputs] of one quantise and one linear record."""
    rows = len(x)
    program = new_program(isa, rows, num_threads)
    source, target = program.add_buffer(matrix.num_inputs), program.add_buffer(matrix.num_outputs)
    activations = program.add_activations(matrix.num_inputs)
    fmt = matrix.format
    weight = program.add_matrix(
        matrix.data,
        fmt.kind,
        fmt.group,
        fmt.offset,
        matrix.num_outputs,
        matrix.num_inputs,
        fmt.tile_bytes(matrix.num_inputs),
        fmt.num_groups(matrix.num_inputs),
        matrix.order,
    )
    order = [] if matrix.order is None else matrix.order.tolist()
    program.quantise(source, matrix.num_inputs, activations, fmt.per_token, order)
    program.linear([weight], [0], [-1], source, activations, target, False)
    begin_step(program, rows)
    program.buffer(source, rows)[:, : matrix.num_inputs] = x
    program.run_records(1, 3)
    return program.buffer(target, rows)[:, : matrix.num_outputs].copy()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 18),
    num_outputs=st.integers(1, 70),
    blocks=st.integers(1, 5),
    num_threads=st.sampled_from([1, 2, 3]),
    ordered=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_format_is_the_defined_product(
    isa: str, fmt: PackedFormat, rows: int, num_outputs: int, blocks: int, num_threads: int, ordered: bool, seed: int
) -> None:
    num_inputs = blocks * max(fmt.group, RUN)
    groups, x = random_groups(fmt, num_outputs, num_inputs, seed), random_rows(rows, num_inputs, seed)
    order = np.random.default_rng(seed).permutation(num_inputs).astype(np.int32) if ordered else None
    expected = defined_product(groups, fmt, x if order is None else x[:, order])
    found = native_product(isa, packed(groups, fmt, order), x, num_threads=num_threads)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(isa: str, fmt: PackedFormat) -> None:
    """More rows than a block, than a chunk (32), and than what another kernel of the same product may begin at."""
    groups, x = random_groups(fmt, 33, 640, 0), random_rows(130, 640, 1)
    expected = defined_product(groups, fmt, x)
    matrix = packed(groups, fmt)
    for rows in [*range(1, 40), 64, 65, 130]:
        assert np.array_equal(native_product(isa, matrix, x[:rows], num_threads=2), expected[:rows]), rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["u4", "i8"])
def test_groups_of_equal_scales_have_the_bits_of_groups_of_32(isa: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    low, high, middle = (0, 16, 8) if kind == "u4" else (-128, 128, 0)
    codes = rng.integers(low, high, (37, 512)).astype(np.int8)
    scale = rng.standard_normal((37, 4)).astype(np.float16).astype(np.float32)
    x = random_rows(7, 512, 3)
    bits = []
    for group in (32, 64, 128):
        repeated = np.repeat(scale, 128 // group, axis=1)
        minimum = np.float32(-8) * repeated if kind == "u4" else None
        plain = AffineGroups(codes, repeated, minimum, group)
        bits.append(native_product(isa, packed(plain, PackedFormat(kind, group)), x))
        zero = np.full(repeated.shape, middle, np.int16)
        zeroed = AffineGroups(codes, repeated, None, group, zero)
        bits.append(native_product(isa, packed(zeroed, PackedFormat(kind, group, "zero")), x))
    assert all(np.array_equal(found.view(np.uint32), bits[0].view(np.uint32)) for found in bits[1:])
    assert np.abs(bits[0]).min() > 0


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_sums_of_e2m1(isa: str) -> None:
    """As plain AVX2 adds them up in 16 bits: weights of 24, which stand for 12, times 127."""
    fmt = PackedFormat("e2m1", RUN)
    codes = np.repeat(np.array([[7], [15]], np.int8), 96, axis=1)
    groups = AffineGroups(codes, np.ones((2, 3), np.float32), None, RUN, levels=MXFP4_DOUBLED)
    x = np.full((9, 96), 127.0, np.float32)
    x[1::2] = -127.0
    found = native_product(isa, packed(groups, fmt), x)
    assert np.array_equal(found[:2], np.array([[12.0, -12.0], [-12.0, 12.0]], np.float32) * 96 * 127)
    assert np.array_equal(found, defined_product(groups, fmt, x))


@pytest.mark.parametrize("isa", ISAS)
def test_e2m1_has_the_bits_of_its_values_in_8_bits(isa: str) -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (37, 160)).astype(np.int8)
    scale = (2.0 ** rng.integers(-12, 3, (37, 5))).astype(np.float32)
    four = AffineGroups(codes, scale, None, RUN, levels=MXFP4_DOUBLED)
    eight = AffineGroups(MXFP4_DOUBLED[codes], scale, None, RUN)
    x = random_rows(11, 160, 3)
    found = native_product(isa, packed(four, PackedFormat("e2m1", RUN)), x)
    assert np.array_equal(found, native_product(isa, packed(eight, PackedFormat("i8", RUN)), x))


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_sums_of_one_scale_an_output(isa: str) -> None:
    """Every product at its largest, of as many inputs as are allowed: the sum is just below 2^31."""
    num_inputs = 132_096
    fmt = PackedFormat("i8c", RUN)
    codes = np.full((2, num_inputs), -128, np.int8)
    codes[1] = 127
    groups = AffineGroups(codes, np.ones((2, 1), np.float32), None, num_inputs)
    x = np.full((5, num_inputs), -1.0, np.float32)
    x[1] = 1.0
    found = native_product(isa, packed(groups, fmt), x)
    largest = np.float32(num_inputs * 128 * 127) * np.float32(1 / np.float32(127))
    assert found[0, 0] == largest
    assert found[1, 0] == -largest
    assert np.array_equal(found, defined_product(groups, fmt, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 200])
def test_rounded_activations_are_the_defined_ones(isa: str, per_token: bool, width: int) -> None:
    """In any order, one or many rows (each thread rounds one or two for itself)."""
    for rows, ordered in ((1, False), (2, True), (3, False), (9, True)):
        x = random_rows(rows, width, rows)
        order = np.random.default_rng(width).permutation(width).astype(np.int32) if ordered else None
        program = new_program(isa, rows, 2)
        source, activations = program.add_buffer(width), program.add_activations(width)
        program.quantise(source, width, activations, per_token, [] if order is None else order.tolist())
        begin_step(program, rows)
        program.buffer(source, rows)[:, :width] = x
        program.run_records(1, 2)
        expected = rounded_activations(x, Rounding(per_token, order))
        expected = expected if order is None else expected[:, order]
        assert np.array_equal(program.dequantised(activations, rows)[:, :width], expected)


def test_the_definition_is_no_other() -> None:
    """The comparison is not blind: with another zero point, order of runs or scale the product differs."""
    fmt = PackedFormat("u4", 64, "zero")
    groups, x = random_groups(fmt, 16, 256, 5), random_rows(4, 256, 6)
    found = native_product(ISAS[0], packed(groups, fmt), x)
    moved = AffineGroups(groups.q, groups.scale, None, 64, groups.zero + np.int16(1))
    assert not np.array_equal(found, defined_product(moved, fmt, x))
    assert not np.array_equal(found, defined_product(groups, fmt, x[:, ::-1]))


@pytest.mark.parametrize("wrong", ["per_token", "order", "float"])
def test_weights_that_read_another_form_are_refused(wrong: str) -> None:
    fmt = PackedFormat("i8c", RUN) if wrong == "per_token" else PackedFormat("u4", 64)
    order = np.arange(128, dtype=np.int32)[::-1].copy() if wrong == "order" else None
    matrix = packed(random_groups(fmt, 16, 128, 0), fmt, order)
    program = new_program(ISAS[0], 4, 1)
    source, target, activations = program.add_buffer(128), program.add_buffer(16), program.add_activations(128)
    weight = program.add_matrix(
        matrix.data, fmt.kind, fmt.group, fmt.offset, 16, 128, fmt.tile_bytes(128), fmt.num_groups(128), order
    )
    program.quantise(source, 128, activations)
    with pytest.raises(RuntimeError, match="int8 form" if wrong == "float" else "as the weights ask|order of the"):
        program.linear([weight], [0], [-1], source, -1 if wrong == "float" else activations, target, False)
