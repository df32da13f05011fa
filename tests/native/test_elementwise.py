"""Records that work on numbers one by one, at any size and magnitude: softcaps, gated products, norms in place and
norms that are added. Errors against float64, and equal bits on every instruction set and any number of threads.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from bare_program import begin_step, new_program
from numpy.typing import NDArray

from paceline import _native
from paceline.ops.reference import activated, quantise_activations
from paceline.weights.packed import CHOSEN_FORMATS
from paceline.weights.tiling import pack

F32 = NDArray[np.float32]
ISAS = _native.isas()
EPSILON = np.finfo(np.float32).eps
NONE = -1


def run(program: _native.Program, rows: int) -> None:
    begin_step(program, rows)
    program.run_records(0, program.num_records)


def add_matrix(program: _native.Program, values: F32) -> int:
    fmt, (outputs, inputs) = CHOSEN_FORMATS["f32"], values.shape
    return program.add_matrix(
        pack(values, fmt), fmt.kind, 0, fmt.offset, outputs, inputs, fmt.tile_bytes(inputs), fmt.num_groups(inputs)
    )


def numbers(count: int, seed: int = 0) -> F32:
    """Of every magnitude, both signs, many where tanh bends, and what is not a number."""
    rng = np.random.default_rng(seed)
    special = [0.0, -0.0, 1e-45, -1e-45, 9.0, 9.1, 10.0, 44.0, 88.0, -87.4, 3e38, -3e38, np.inf, -np.inf, np.nan]
    bent = rng.uniform(-10, 10, count // 2)
    wide = rng.choice([-1, 1], count // 2) * np.exp(rng.uniform(-100, 88, count // 2))
    return np.concatenate([special, bent, wide]).astype(np.float32)[:count]


def softcapped(isa: str, x: F32, cap: float, *, scale: float = 1.0) -> F32:
    """cap * tanh(scale * x / cap) of x [rows, 16], as the end of a product with the identity."""
    program = new_program(isa, len(x), 1)
    source, target = program.add_buffer(16), program.add_buffer(16)
    matrix = add_matrix(program, np.eye(16, dtype=np.float32))
    program.linear([matrix], [0], [NONE], source, NONE, target, False, scale, cap)
    program.buffer(source, len(x))[:, :16] = x
    run(program, len(x))
    return program.buffer(target, len(x))[:, :16].copy()


def softcapped_numbers(isa: str, x: F32, cap: float, *, scale: float = 1.0) -> F32:
    """The same of single numbers [count], each in a row that is 0 elsewhere: a product with the identity leaves it."""
    places = np.arange(len(x)), np.arange(len(x)) % 16
    rows = np.zeros((len(x), 16), np.float32)
    rows[places] = x
    return softcapped(isa, rows, cap, scale=scale)[places]


@pytest.mark.parametrize("isa", ISAS)
def test_tanh_is_within_two_units_in_the_last_place(isa: str) -> None:
    x = numbers(6000)
    found = softcapped_numbers(isa, x, 1.0)
    finite = ~np.isnan(x)
    expected = np.tanh(x[finite].astype(np.float64))
    unit = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    assert (np.abs(found[finite] - expected) <= 2 * unit).all()
    assert np.array_equal(np.sign(found[finite]), np.sign(expected))
    assert (np.abs(found[finite]) <= 1).all()
    assert np.isnan(found[~finite]).all()
    assert np.array_equal(found, softcapped_numbers("scalar", x, 1.0), equal_nan=True)
    assert (np.abs(found[finite] * np.float32(1 + 3 * EPSILON) - expected) > 2 * unit).any()  # the bound is no wider


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_of_scaled_products(isa: str) -> None:
    x = numbers(3000, seed=1)
    x = x[np.isfinite(x) & (np.abs(x) < 1e37)]
    found = softcapped_numbers(isa, x, 30.0, scale=0.7)
    expected = 30.0 * np.tanh(x * np.float64(np.float32(0.7)) / 30.0)
    assert (np.abs(found - expected) <= 8 * EPSILON * np.abs(expected) + 1e-43).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 33, 80])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gated_products_of_any_size(
    isa: str, size: int, activation: Literal["silu", "gelu_tanh", "swiglu_oai"]
) -> None:
    """Against the definition, as floats and int8; beyond the last value is nothing that was not there before."""
    rows = 300
    program = new_program(isa, rows, 2)
    column = -(-size // 32) * 32
    source, target = program.add_buffer(2 * column), program.add_buffer(size)
    activations = program.add_activations(size)
    program.glu(activation, source, column, size, target, activations)
    gate = numbers(rows * size, seed=size).reshape(rows, size)
    gate[~np.isfinite(gate) | (np.abs(gate) > 1e12)] = 1.5
    up = np.random.default_rng(size).uniform(-9, 9, (rows, size)).astype(np.float32)
    program.buffer(source, rows)[:, :size] = gate
    program.buffer(source, rows)[:, column : column + size] = up
    run(program, rows)
    found = program.buffer(target, rows)[:, :size]
    expected = activated(gate, up, activation).astype(np.float64)
    g = gate.astype(np.float64)
    z = {"silu": 0 * g, "gelu_tanh": 1.6 * g + 0.0714 * g**3, "swiglu_oai": 1.702 * g}[activation]
    relative = EPSILON * (16 + 4 * np.minimum(np.abs(z), 90))
    # The clamp of the exponential leaves a number below 1e-37 of the gate where the definition has less.
    assert (
        np.abs(found - expected) <= relative * np.abs(expected) + 1e-36 * np.abs(g) * (np.abs(up) + 1) + 1e-36
    ).all()
    assert not program.buffer(target, rows)[:, size:].any()
    q, scale = quantise_activations(found)
    rounded = program.dequantised(activations, rows)
    assert np.array_equal(rounded[:, :size], (q * np.repeat(scale, 32, axis=1)[:, :size]).astype(np.float32))
    assert not rounded[:, size:].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gated_products_keep_what_is_not_a_number(
    isa: str, activation: Literal["silu", "gelu_tanh", "swiglu_oai"]
) -> None:
    program = new_program(isa, 2, 1)
    source, target = program.add_buffer(64), program.add_buffer(32)
    program.glu(activation, source, 32, 32, target, NONE)
    values = program.buffer(source, 2)
    values[:] = 1.0
    values[0, 3] = values[1, 32 + 5] = np.nan
    run(program, 2)
    wrong = np.isnan(program.buffer(target, 2))
    assert wrong[0, 3]
    assert wrong[1, 5]
    assert wrong.sum() == 2


def normed(x: F32, weight: F32, eps: float) -> NDArray[np.float64]:
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("column", "size"), [(0, 16), (16, 16), (16, 48), (48, 80), (0, 144), (32, 5)])
def test_norms_in_place_leave_their_neighbours_alone(isa: str, num_threads: int, column: int, size: int) -> None:
    rows, rng = 7, np.random.default_rng(size)
    program = new_program(isa, rows + 1, num_threads)
    buffer = program.add_buffer(160)
    weight = rng.standard_normal(size).astype(np.float32)
    program.norm_in_place(buffer, column, program.add_vector(weight), 1e-5, size, False)
    values = program.buffer(buffer, rows + 1)
    values[:] = np.nan  # whatever is beside the columns must not enter
    x = rng.standard_normal((rows, size)).astype(np.float32)
    end = column + -(-size // 16) * 16
    values[:rows, column:end] = 0
    values[:rows, column : column + size] = x
    run(program, rows)
    expected = normed(x, weight, 1e-5)
    assert (np.abs(values[:rows, column : column + size] - expected) <= 32 * EPSILON * np.abs(expected)).all()
    assert np.isnan(values[:rows, :column]).all()
    assert np.isnan(values[:rows, end:]).all()
    assert np.isnan(values[rows]).all()


@pytest.mark.parametrize("size", [16, 48, 70, 640])
@pytest.mark.parametrize("following", ["norm", "itself", "norm as floats", "nothing"])
def test_a_norm_that_is_added_and_what_reads_the_sum(size: int, following: str) -> None:
    """The same bits for any number of rows, threads and instruction sets, and only the rows of the step written."""
    rng = np.random.default_rng(size)
    most = 5
    x, residual = rng.standard_normal((2, most, size)).astype(np.float32)
    first, second = rng.standard_normal((2, size)).astype(np.float32)
    expected = residual + normed(x, first, 1e-6)
    seen: list[Any] = []
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            for rows in range(1, most + 1):
                program = new_program(isa, most + 1, num_threads)
                buffers = [program.add_buffer(size) for _ in range(4)]
                activations = program.add_activations(size)
                program.norm_add(
                    buffers[0],
                    program.add_vector(first),
                    1e-6,
                    size,
                    buffers[1],
                    buffers[2],
                    program.add_vector(second) if following.startswith("norm") else NONE,
                    1e-5,
                    buffers[3] if following == "norm as floats" else NONE,
                    activations if following in ("norm", "itself") else NONE,
                )
                program.buffer(buffers[0], rows)[:, :size] = x[:rows]
                program.buffer(buffers[1], rows)[:, :size] = residual[:rows]
                run(program, rows)
                total = program.buffer(buffers[2], most + 1)[:, :size].copy()
                assert not total[rows:].any()
                assert np.array_equal(program.buffer(buffers[1], rows)[:, :size], residual[:rows])
                next_values = {
                    "norm as floats": program.buffer(buffers[3], rows)[:, :size].copy(),
                    "nothing": total[:rows],
                }.get(following, program.dequantised(activations, rows)[:, :size])
                seen.append((total[:rows], next_values))
    whole_total, whole_next = max(seen, key=lambda pair: len(pair[0]))
    assert (np.abs(whole_total - expected) <= 64 * EPSILON * (np.abs(expected) + np.abs(residual) + 1)).all()
    for total, next_values in seen:
        assert np.array_equal(total, whole_total[: len(total)])
        assert np.array_equal(next_values, whole_next[: len(next_values)])
    if following in ("norm", "norm as floats"):
        after = normed(whole_total, second, 1e-5)
        step = np.abs(after).max() / 127 if following == "norm" else 0.0
        assert (np.abs(whole_next - after) <= 64 * EPSILON * np.abs(after) + 0.51 * step).all()
    elif following == "itself":
        q, scale = quantise_activations(whole_total)
        assert np.array_equal(whole_next, (q * np.repeat(scale, 32, axis=1)[:, :size]).astype(np.float32))


def test_a_sum_may_not_overwrite_what_threads_still_read() -> None:
    program = new_program("scalar", 2, 2)
    a, b = program.add_buffer(16), program.add_buffer(16)
    weight = program.add_vector(np.ones(16, np.float32))
    with pytest.raises(RuntimeError, match="buffers that differ"):
        program.norm_add(a, weight, 1e-6, 16, b, b, NONE, 0.0, NONE, NONE)
    with pytest.raises(RuntimeError, match="columns of the buffer"):
        program.norm_in_place(a, 32, weight, 1e-6, 16, False)


@pytest.mark.parametrize("isa", ISAS)
def test_the_scale_of_an_embedding_is_one_exact_product(isa: str) -> None:
    program = new_program(isa, 1, 1)
    values = np.random.default_rng(0).standard_normal((1, 33)).astype(np.float32)
    matrix = add_matrix(program, values)
    target = program.add_buffer(33)
    scale = float(np.float32(25.298221))
    program.embed(matrix, target, scale)
    run(program, 1)
    assert np.array_equal(program.buffer(target, 1)[:, :33], values * np.float32(scale))
