"""The records of a mixture of experts, bit for bit: each expert alone over all rows, then one fused multiply-add for
each choice of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
from bare_program import begin_step, new_program
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_matrices import fma, packed

from paceline import _native
from paceline.weights.blocks import MXFP4_DOUBLED, AffineGroups
from paceline.weights.packed import PackedFormat, PackedMatrix
from paceline.weights.tiling import pack

F32 = NDArray[np.float32]
ISAS = _native.isas()
FORMATS = {
    "f32": PackedFormat("f32"),
    "bf16": PackedFormat("bf16"),
    "u4": PackedFormat("u4", 32),
    "u4z": PackedFormat("u4", 64, "zero"),
    "e2m1": PackedFormat("e2m1", 32),
    "i8": PackedFormat("i8", 32),
    "i8c": PackedFormat("i8c", 32),
}
HIDDEN, WIDTH = 128, 192
NONE = -1


@dataclass(frozen=True)
class Layer:
    """The weights of all experts, packed: expert e has the e-th part of the outputs; biases [experts, outputs]."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    biases: tuple[F32, F32, F32] | None = None
    num_experts: int = 6
    num_chosen: int = 3

    def expert(self, index: int) -> Layer:
        """A layer of one expert."""
        biases = None if self.biases is None else tuple(bias[index : index + 1] for bias in self.biases)
        parts = (self._part(matrix, index) for matrix in (self.gate, self.up, self.down))
        return Layer(*parts, biases, 1, 1)  # type: ignore[arg-type]

    def _part(self, matrix: PackedMatrix, index: int) -> PackedMatrix:
        outputs = matrix.num_outputs // self.num_experts
        data = np.split(matrix.data, self.num_experts)[index]
        return PackedMatrix("part", matrix.format, outputs, matrix.num_inputs, np.ascontiguousarray(data))


def random_matrix(fmt: PackedFormat, num_outputs: int, num_inputs: int, seed: int) -> PackedMatrix:
    """Weights of a deviation of about 1 / sqrt(inputs)."""
    rng = np.random.default_rng(seed)
    if not fmt.group:
        values = rng.standard_normal((num_outputs, num_inputs)) / np.sqrt(num_inputs)
        return PackedMatrix("t", fmt, num_outputs, num_inputs, pack(values.astype(np.float32), fmt))
    low, high, deviation = (0, 16, 4.6) if fmt.has_four_bits else (-128, 128, 74)
    codes = rng.integers(low, high, (num_outputs, num_inputs)).astype(np.int8)
    shape = (num_outputs, 1 if fmt.per_token else -(-num_inputs // fmt.group))
    scale = (rng.uniform(0.5, 1.5, shape) / (deviation * np.sqrt(num_inputs))).astype(np.float16).astype(np.float32)
    if fmt.offset == "zero":
        return packed(AffineGroups(codes, scale, None, fmt.group, rng.integers(4, 12, shape).astype(np.int16)), fmt)
    if fmt.kind == "e2m1":
        return packed(AffineGroups(codes, scale, None, fmt.group, levels=MXFP4_DOUBLED), fmt)
    minimum = np.float32(-8) * scale if fmt.kind == "u4" else None
    return packed(AffineGroups(codes, scale, minimum, num_inputs if fmt.per_token else fmt.group), fmt)


@lru_cache
def layer_of(gate: str, up: str, down: str, *, width: int = WIDTH, biases: bool = False) -> Layer:
    count = 6
    given_biases = None
    if biases:
        rng = np.random.default_rng(9)
        given_biases = tuple(rng.standard_normal((count, n)).astype(np.float32) for n in (width, width, HIDDEN))
    return Layer(
        random_matrix(FORMATS[gate], count * width, HIDDEN, 1),
        random_matrix(FORMATS[up], count * width, HIDDEN, 2),
        random_matrix(FORMATS[down], count * HIDDEN, width, 3),
        given_biases,  # type: ignore[arg-type]
    )


class Built:
    """A program of a layer: what it makes of inputs, logits and a residual stream."""

    def __init__(self, layer: Layer, isa: str, rows: int, *, num_threads: int = 1, normalise: bool = True) -> None:
        self.layer, self.rows = layer, rows
        hidden, width = layer.gate.num_inputs, layer.gate.num_outputs // layer.num_experts
        self.program = program = new_program(isa, rows, num_threads)
        self.x, self.out = program.add_buffer(hidden), program.add_buffer(layer.down.num_outputs // layer.num_experts)
        self.logits, self.routing = program.add_buffer(layer.num_experts), program.add_buffer(2 * layer.num_chosen)
        h = program.add_buffer(width, per_row=layer.num_chosen)
        slots = program.add_slots(layer.num_experts, layer.num_chosen)
        gate, up, down = (self._matrix(matrix) for matrix in (layer.gate, layer.up, layer.down))
        biases = [NONE] * 3
        if layer.biases is not None:
            biases = [program.add_vector(bias.reshape(-1)) for bias in layer.biases]
        program.route(self.logits, slots, normalise, self.routing)
        source, target = NONE, NONE
        if layer.gate.format.group or layer.up.format.group:
            source = program.add_activations(hidden)
            program.quantise(self.x, hidden, source, layer.gate.format.per_token)
        if layer.down.format.group:
            target = program.add_activations(width, per_row=layer.num_chosen)
        fused = target if not layer.down.format.per_token else NONE
        program.experts_glu(gate, up, *biases[:2], slots, "silu", self.x, source, h, fused)
        if fused != target:
            program.quantise(h, width, target, True)
        program.experts_down(down, biases[2], slots, self.routing, h, target, self.out, True)

    def _matrix(self, matrix: PackedMatrix) -> int:
        fmt, inputs = matrix.format, matrix.num_inputs
        shape = (matrix.num_outputs, inputs, fmt.tile_bytes(inputs), fmt.num_groups(inputs))
        return self.program.add_matrix(matrix.data, fmt.kind, fmt.group, fmt.offset, *shape)

    def run(self, x: F32, logits: F32, residual: F32) -> F32:
        """The residual stream after the layer; fewer rows than it was built for are allowed."""
        rows, program = len(x), self.program
        begin_step(program, rows)
        for buffer, values in ((self.x, x), (self.logits, logits), (self.out, residual)):
            program.buffer(buffer, rows)[:, : values.shape[1]] = values
        program.run_records(1, program.num_records)
        return program.buffer(self.out, rows)[:, : residual.shape[1]].copy()

    def routed(self, rows: int) -> tuple[NDArray[np.int64], F32]:
        """Experts and weights [rows, chosen] of the last run."""
        table, count = self.program.buffer(self.routing, rows), self.layer.num_chosen
        return table[:, :count].astype(np.int64), table[:, count : 2 * count].copy()


def random_step(rows: int, num_experts: int, seed: int) -> tuple[F32, F32, F32]:
    """Inputs, logits with ties, residual stream."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-4, 4, (rows, num_experts)).astype(np.float32)
    residual = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    return rng.standard_normal((rows, HIDDEN)).astype(np.float32), logits, residual


def defined(layer: Layer, isa: str, x: F32, experts: NDArray[np.int64], weights: F32, residual: F32) -> F32:
    """By dense steps: expert e as a layer of its own with weight 1 and no residual gives y_e of every row."""
    rows, zeros = len(x), np.zeros_like(residual)
    one = np.ones((rows, 1), np.float32)
    y = np.stack([Built(layer.expert(e), isa, rows).run(x, one, zeros) for e in range(layer.num_experts)])
    total = zeros
    for j in range(layer.num_chosen):
        total = fma(weights[:, j : j + 1], y[experts[:, j], np.arange(rows)], total)
    return residual + total


def same_bits(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 20), num_threads=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_a_layer_is_its_experts_added_in_order(isa: str, fmt: str, rows: int, num_threads: int, seed: int) -> None:
    layer = layer_of(fmt, fmt, fmt)
    x, logits, residual = random_step(rows, layer.num_experts, seed)
    built = Built(layer, isa, rows, num_threads=num_threads)
    found = built.run(x, logits, residual)
    assert same_bits(found, defined(layer, isa, x, *built.routed(rows), residual))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("formats", "width", "biases"),
    [
        (("u4", "i8", "f32"), WIDTH, False),
        (("f32", "u4", "i8"), WIDTH, False),
        (("u4", "u4", "u4z"), WIDTH, True),
        (("f32", "f32", "f32"), 48, True),
        (("f32", "f32", "f32"), 16, False),
    ],
    ids=str,
)
def test_formats_that_differ_biases_and_an_odd_number_of_tiles(
    isa: str, formats: tuple[str, str, str], width: int, biases: bool
) -> None:
    layer = layer_of(*formats, width=width, biases=biases)
    x, logits, residual = random_step(7, layer.num_experts, 0)
    built = Built(layer, isa, 7, num_threads=2)
    found = built.run(x, logits, residual)
    assert same_bits(found, defined(layer, isa, x, *built.routed(7), residual))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_has_the_same_bits_among_any_rows_on_any_threads(isa: str, fmt: str) -> None:
    """More slots of an expert than are gathered at once (32), experts without rows, all rows on the same experts."""
    layer = layer_of(fmt, fmt, fmt)
    x, logits, residual = random_step(130, layer.num_experts, 1)
    logits[:60] = logits[0]  # runs of neighbours
    logits[:, 5] = -9  # nobody chooses it
    alone = Built(layer, isa, 1)
    expected = np.concatenate(
        [alone.run(x[row : row + 1], logits[row : row + 1], residual[row : row + 1]) for row in range(130)]
    )
    for num_threads in (1, 2, 3):
        built = Built(layer, isa, 130, num_threads=num_threads)
        for rows in [*range(1, 21), 64, 130]:
            assert same_bits(built.run(x[:rows], logits[:rows], residual[:rows]), expected[:rows]), rows
            start = 130 - rows
            assert same_bits(built.run(x[start:], logits[start:], residual[start:]), expected[start:]), rows


@pytest.mark.parametrize("fmt", FORMATS)
def test_instruction_sets_give_the_same_bits(fmt: str) -> None:
    layer = layer_of(fmt, fmt, fmt)
    x, logits, residual = random_step(9, layer.num_experts, 2)
    logits += np.random.default_rng(0).standard_normal(logits.shape).astype(np.float32)
    results = [Built(layer, isa, 9).run(x, logits, residual) for isa in ISAS]
    assert all(same_bits(found, results[0]) for found in results[1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    num_experts=st.integers(1, 70),
    chosen=st.integers(1, 32),
    levels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 10**6),
)
def test_routing(isa: str, normalise: bool, rows: int, num_experts: int, chosen: int, levels: int, seed: int) -> None:
    """Ids exactly, ties by the lower id. Weights to within roundings: of the difference to the largest logit, which is
    the exponent, of the exponential (2 ulp), of the sum, and of the quotient."""
    chosen = min(chosen, num_experts)
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, levels, (rows, num_experts)) * np.float32(40 / levels)).astype(np.float32)
    program = new_program(isa, rows, 2)
    source, target = program.add_buffer(num_experts), program.add_buffer(2 * chosen)
    program.route(source, program.add_slots(num_experts, chosen), normalise, target)
    begin_step(program, rows)
    program.buffer(source, rows)[:] = np.nan  # what lies beside the logits is not read
    program.buffer(source, rows)[:, :num_experts] = logits
    program.run_records(1, 2)
    found = program.buffer(target, rows)[:, : 2 * chosen]
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :chosen]
    assert np.array_equal(found[:, :chosen], ids)
    scores = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(scores, ids, axis=1)
    weights /= (weights if normalise else scores).sum(axis=1, keepdims=True)
    exponents = logits.max(axis=1, keepdims=True) - np.take_along_axis(logits, ids, axis=1)
    bound = (exponents + num_experts / 16 + 8) * np.finfo(np.float32).eps * weights + 1e-37
    assert (np.abs(found[:, chosen:] - weights) <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_logit_that_is_not_finite_shows_in_the_result(isa: str, bad: float) -> None:
    layer = layer_of("u4", "u4", "u4")
    x, logits, residual = random_step(3, layer.num_experts, 4)
    clean = Built(layer, isa, 3).run(x, logits, residual)
    logits[1, 4] = bad
    found = Built(layer, isa, 3).run(x, logits, residual)
    assert not np.isfinite(found[1]).any()
    assert same_bits(found[::2], clean[::2])


def test_the_comparison_sees_a_wrong_order_weight_or_expert() -> None:
    layer = layer_of("u4", "u4", "u4")
    x, logits, residual = random_step(8, layer.num_experts, 5)
    built = Built(layer, ISAS[0], 8)
    found = built.run(x, logits, residual)
    experts, weights = built.routed(8)
    assert same_bits(found, defined(layer, ISAS[0], x, experts, weights, residual))
    wrong = [
        (experts[:, ::-1], weights[:, ::-1]),
        (experts, np.nextafter(weights, np.float32(1))),
        (experts[:, ::-1], weights),
    ]
    for chosen, scores in wrong:
        assert not same_bits(found, defined(layer, ISAS[0], x, chosen, scores, residual))


def test_experts_whose_outputs_are_no_whole_tiles_are_refused() -> None:
    program = new_program(ISAS[0], 2, 1)
    fmt = PackedFormat("f32")
    matrix = random_matrix(fmt, 40, 32, 0)  # 5 experts of 8 outputs
    weight = program.add_matrix(matrix.data, "f32", 0, "none", 40, 32, fmt.tile_bytes(32), fmt.num_groups(32))
    x, h, slots = program.add_buffer(32), program.add_buffer(8, per_row=2), program.add_slots(5, 2)
    with pytest.raises(RuntimeError, match="whole tiles"):
        program.experts_glu(weight, weight, NONE, NONE, slots, "silu", x, NONE, h, NONE)
