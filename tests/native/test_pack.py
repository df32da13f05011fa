"""The native packer against the numpy reference, bit for bit, and packed tensors end to end."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.blocks import dequantize, f16_to_f32, f32_to_bf16, f32_to_f16
from paceline.weights.packed import (
    CHOSEN_FORMATS,
    MAX_CHANNEL_INPUTS,
    NATIVE_FORMATS,
    TILE,
    PackedFormat,
    PackedMatrix,
)
from paceline.weights.packing import WeightArena, pack_tensors, rope_permutation
from paceline.weights.raw import BLOCK_KINDS, RawTensor
from paceline.weights.tiling import pack_raw, unpack

FLOAT_KINDS = [kind for kind, (block, _) in BLOCK_KINDS.items() if block == 1]
TARGETS = [PackedFormat(kind) for kind in ("bf16", "f16", "f32")]
TARGETS += [PackedFormat("i8", 32), PackedFormat("i8", 16), PackedFormat("u4", 32, "min")]
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXACT_KINDS = [kind for kind in BLOCK_KINDS if not kind.endswith("_K")]


def random_raw(kind: str, num_outputs: int, num_inputs: int, seed: int = 0, name: str = "t") -> RawTensor:
    """Random bytes, so that all codes and 6-bit scales occur; f16 scales of both signs, ordinary and tiny."""
    rng = np.random.default_rng(seed)
    block, block_bytes = BLOCK_KINDS[kind]
    if block == 1:
        size = rng.choice(np.array([1, 1e-3, 1e-9, 0], np.float32), num_outputs * num_inputs)
        values = rng.standard_normal(num_outputs * num_inputs).astype(np.float32) * size
        packed = {"F32": values, "F16": values.astype(np.float16), "BF16": f32_to_bf16(values)}[kind]
        return RawTensor(name, (num_outputs, num_inputs), kind, packed.view(np.uint8))
    blocks = rng.integers(0, 256, (num_outputs * num_inputs // block, block_bytes), dtype=np.uint8)
    if kind == "Q8C":
        scale = rng.standard_normal(num_outputs) * rng.choice([1e-2, 1e-7, 1e-41, 0], num_outputs)
        blocks[:, :4] = np.repeat(scale.astype(np.float32), num_inputs // block)[:, None].view(np.uint8)
        return RawTensor(name, (num_outputs, num_inputs), kind, blocks.reshape(-1))
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(104, 137, len(blocks))  # scales that f16 holds
        return RawTensor(name, (num_outputs, num_inputs), kind, blocks.reshape(-1))
    for at in SCALES_AT.get(kind, (0,)):
        size = rng.choice([1e-2, 1e-3, 1e-7], (len(blocks), 1))
        blocks[:, at : at + 2] = (rng.standard_normal((len(blocks), 1)) * size).astype(np.float16).view(np.uint8)
    return RawTensor(name, (num_outputs, num_inputs), kind, blocks.reshape(-1))


def native_pack(
    raw: RawTensor, fmt: PackedFormat, permutation: np.ndarray | None = None, num_threads: int = 1
) -> tuple[np.ndarray, bool]:
    """The packed bytes, after a check that nothing around them was written, and whether all numbers are finite."""
    size, zone = fmt.matrix_bytes(*raw.shape), 96
    memory = np.full(size + 2 * zone, 0xA5, np.uint8)
    finite = _native.pack_matrix(
        raw.data,
        raw.kind,
        *raw.shape,
        permutation,
        raw.order,
        fmt.kind,
        fmt.group,
        fmt.offset,
        memory[zone : zone + size],
        num_threads,
    )
    assert (memory[:zone] == 0xA5).all()
    assert (memory[zone + size :] == 0xA5).all()
    return memory[zone : zone + size], finite


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("num_outputs", [1, 16, 37])
def test_native_equals_reference(kind: str, num_outputs: int) -> None:
    raw = random_raw(kind, num_outputs, 768)
    permutation = np.random.default_rng(1).permutation(num_outputs).astype(np.int32)
    order = np.random.default_rng(2).permutation(768).astype(np.int32)
    for fmt in {NATIVE_FORMATS[kind], *TARGETS}:
        for rows, columns in product((None, permutation), (None, order)):
            ordered = replace(raw, order=columns)
            data, finite = native_pack(ordered, fmt, rows)
            assert finite
            assert np.array_equal(data, pack_raw(ordered, fmt, rows)), (fmt, rows is not None, columns is not None)


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(FLOAT_KINDS), st.sampled_from(TARGETS), st.integers(1, 40), st.integers(1, 530), st.integers(0, 99)
)
def test_native_equals_reference_for_any_inputs(
    kind: str, fmt: PackedFormat, num_outputs: int, num_inputs: int, seed: int
) -> None:
    raw = random_raw(kind, num_outputs, num_inputs, seed)
    data, finite = native_pack(raw, fmt)
    assert finite
    assert np.array_equal(data, pack_raw(raw, fmt))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_packed_weights_are_those_of_the_file(kind: str) -> None:
    raw, fmt = random_raw(kind, 21, 512), NATIVE_FORMATS[kind]
    data, _ = native_pack(raw, fmt)
    values, expected = unpack(PackedMatrix("t", fmt, 21, 512, data)), dequantize(raw)
    if kind in EXACT_KINDS:
        assert np.array_equal(values, expected)
        return
    # Rounding to f16 takes 2^-11 of a scale and of a minimum, or 2^-25 where f16 is subnormal; a code multiplies the
    # scale's share. |scale| <= 63 |d| (Q6_K: 128 |d|), |minimum| <= 63 |dmin|, and Q5_K adds 16 scale to its minimum.
    block = 16 if kind == "Q6_K" else 32
    largest = np.abs(values - expected).reshape(21, -1, block).max(axis=2)
    d, dmin = _super_scales(raw)
    scale_bound = np.repeat(np.abs(d) * (128 if kind == "Q6_K" else 63), 256 // block, axis=1)
    minimum_bound = np.repeat(np.abs(dmin) * 63, 256 // block, axis=1)
    codes = {"Q4_K": 15, "Q5_K": 16, "Q6_K": 32}[kind]
    moved = 16 if kind == "Q5_K" else 0
    rounding = codes * scale_bound + minimum_bound + moved * scale_bound
    assert (largest <= rounding * 2.0**-11 + (codes + 1) * 2.0**-25 + rounding * 2.0**-22).all()


@pytest.mark.parametrize("fmt", [PackedFormat(kind) for kind in ("bf16", "f16", "f32")], ids=str)
@pytest.mark.parametrize("num_inputs", [1, 7, 32, 257])
def test_a_float_format_has_its_columns_in_the_layers_order(fmt: PackedFormat, num_inputs: int) -> None:
    raw = random_raw("F32", 19, num_inputs)
    order = np.random.default_rng(3).permutation(num_inputs).astype(np.int32)
    data, _ = native_pack(replace(raw, order=order), fmt)
    plain = np.empty((19, num_inputs), np.float32)
    plain[:, order] = raw.data.view(np.float32).reshape(19, num_inputs)
    expected, _ = native_pack(RawTensor("t", raw.shape, "F32", plain.reshape(-1).view(np.uint8)), fmt)
    assert np.array_equal(data, expected)


def _super_scales(raw: RawTensor) -> tuple[np.ndarray, np.ndarray]:
    blocks = raw.data.reshape(raw.shape[0], -1, BLOCK_KINDS[raw.kind][1])
    at = SCALES_AT[raw.kind]
    halves = [np.ascontiguousarray(blocks[:, :, i : i + 2]).view(np.float16)[:, :, 0].astype(np.float32) for i in at]
    return halves[0], halves[1] if len(at) == 2 else np.zeros_like(halves[0])


def test_a_wrong_byte_in_the_file_is_seen() -> None:
    raw = random_raw("Q4_1", 16, 64)
    before, _ = native_pack(raw, NATIVE_FORMATS["Q4_1"])
    broken = raw.data.copy()
    broken[7] ^= 0x10
    after, _ = native_pack(RawTensor("t", raw.shape, raw.kind, broken), NATIVE_FORMATS["Q4_1"])
    assert np.count_nonzero(before != after) == 1


@pytest.mark.parametrize(("kind", "fmt"), [("Q4_1", NATIVE_FORMATS["Q4_1"]), ("F32", CHOSEN_FORMATS["int4"])])
def test_threads_do_not_change_bytes(kind: str, fmt: PackedFormat) -> None:
    raw = random_raw(kind, 1601, 1024)  # large enough that threads are really started
    expected, _ = native_pack(raw, fmt)
    for num_threads in (2, 3, 64):
        assert np.array_equal(native_pack(raw, fmt, num_threads=num_threads)[0], expected)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_source_may_be_misaligned(kind: str) -> None:
    raw = random_raw(kind, 17, 256)
    memory = np.empty(raw.data.size + 1, np.uint8)
    memory[1:] = raw.data
    shifted = RawTensor("t", raw.shape, kind, memory[1:])
    for fmt in (NATIVE_FORMATS[kind], CHOSEN_FORMATS["int4"]):
        assert np.array_equal(native_pack(shifted, fmt)[0], native_pack(raw, fmt)[0])


def test_every_half_widens_exactly() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    data, finite = native_pack(RawTensor("t", (16, 4096), "F16", bits.view(np.uint8)), PackedFormat("f32"))
    assert not finite
    values = data.view(np.float32).reshape(4096, 16).T.reshape(-1)
    expected = f16_to_f32(bits)
    numbers = ~np.isnan(expected)
    assert np.isnan(values[~numbers]).all()
    assert np.array_equal(values[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
def test_halves_round_as_numpy_does(bits: list[int]) -> None:
    # Also next to every place where rounding changes: half-way between two halves, subnormals, the largest.
    halves = f16_to_f32(np.array(bits, np.uint32).astype(np.uint16)).view(np.uint32)
    steps = np.array([0x0FFF, 0x1000, 0x1001, 0], np.uint32)
    values = np.concatenate([np.array(bits, np.uint32), (halves[:, None] + steps).reshape(-1)]).view(np.float32)
    data, _ = native_pack(RawTensor("t", (1, values.size), "F32", values.view(np.uint8)), PackedFormat("f16"))
    assert np.array_equal(data.view(np.uint16).reshape(-1, TILE)[:, 0], f32_to_f16(values))


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind != "MXFP4"])
def test_infinity_and_nan_are_reported(kind: str) -> None:
    raw = random_raw(kind, 20, 256)
    rows = raw.data.copy().reshape(20, -1)
    at = SCALES_AT.get(kind, (0,))[0] + {"F32": 2, "Q8C": 2}.get(kind, 0)
    for row, bits in ((0, 0x7F80 if kind in ("F32", "BF16", "Q8C") else 0x7C00), (19, 0xFFFF)):
        bad = rows.copy()
        bad[row, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
        tensor = RawTensor("t", raw.shape, kind, bad.reshape(-1))
        for fmt in (NATIVE_FORMATS[kind], *TARGETS):
            assert not native_pack(tensor, fmt)[1]
            assert native_pack(raw, fmt)[1]


@pytest.mark.parametrize(("exponent", "fits"), [(0, True), (103, True), (143, True), (144, False), (255, False)])
def test_powers_of_two_too_large_for_half_are_reported(exponent: int, fits: bool) -> None:
    """MXFP4's scales; too small ones are rounded, to 0 or 2^-24."""
    rows = random_raw("MXFP4", 20, 256).data.copy().reshape(20, -1)
    rows[19, 0] = exponent
    raw, fmt = RawTensor("t", (20, 256), "MXFP4", rows.reshape(-1)), NATIVE_FORMATS["MXFP4"]
    data, finite = native_pack(raw, fmt)
    assert finite is fits
    if fits:
        off = np.abs(unpack(PackedMatrix("t", fmt, 20, 256, data)) - dequantize(raw))
        assert off.max() <= 12 * 2.0**-25
        assert (off.max() > 0) == (exponent < 104)


def test_a_weight_too_large_for_half_scales_is_reported() -> None:
    values = np.full((16, 32), 1e7, np.float32)
    raw = RawTensor("t", values.shape, "F32", values.reshape(-1).view(np.uint8))
    assert native_pack(raw, PackedFormat("f32"))[1]
    assert not native_pack(raw, CHOSEN_FORMATS["int4"])[1]
    assert not native_pack(raw, PackedFormat("f16"))[1]


def call(**changes: object) -> None:
    raw, fmt = random_raw("Q8_0", 32, 64), NATIVE_FORMATS["Q8_0"]
    arguments = {
        "data": raw.data,
        "kind": "Q8_0",
        "num_outputs": 32,
        "num_inputs": 64,
        "permutation": None,
        "order": None,
        "target_kind": "i8",
        "group": 32,
        "offset": "none",
        "out": np.empty(fmt.matrix_bytes(32, 64), np.uint8),
        "num_threads": 1,
    }
    _native.pack_matrix(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": "Q9_0"}, "unknown source kind Q9_0"),
        ({"target_kind": "i9"}, "unknown target kind i9"),
        ({"num_inputs": 65}, "65 inputs are not whole blocks"),
        ({"num_outputs": 31}, "data has 2176 elements, expected 2108"),
        ({"num_outputs": 0}, "must be positive"),
        ({"num_threads": 0}, "must be positive"),
        ({"offset": "min"}, "cannot turn Q8_0 into i8"),
        ({"offset": "both"}, "unknown offset both"),
        ({"target_kind": "i8c"}, "cannot turn Q8_0 into i8c"),
        ({"order": np.zeros(63, np.int32)}, "order has 63 elements, expected 64"),
        ({"order": np.zeros(64, np.int32)}, "no permutation"),
        ({"order": np.arange(1, 65, dtype=np.int32)}, "no permutation"),
        ({"order": np.arange(-1, 63, dtype=np.int32)}, "no permutation"),
        ({"group": 64}, "cannot turn Q8_0 into i8 of group 64"),
        ({"target_kind": "u4"}, "cannot turn Q8_0 into u4"),
        ({"target_kind": "f32"}, "cannot turn Q8_0 into f32 of group 32"),
        ({"out": np.empty(10, np.uint8)}, "out has 10 elements, expected"),
        ({"permutation": np.zeros(31, np.int32)}, "permutation has 31 elements, expected 32"),
        ({"permutation": np.full(32, 32, np.int32)}, "outside the matrix"),
        ({"permutation": np.full(32, -1, np.int32)}, "outside the matrix"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, object], problem: str) -> None:
    call()
    with pytest.raises(ValueError, match=problem):
        call(**changes)


@pytest.mark.parametrize("out", [np.empty(2176, np.int8), np.empty(4352, np.uint8)[::2], np.empty((2, 1088), np.uint8)])
def test_out_is_never_a_converted_copy(out: np.ndarray) -> None:
    assert NATIVE_FORMATS["Q8_0"].matrix_bytes(32, 64) == out.size
    with pytest.raises(TypeError):
        call(out=out)


def checkpoint_of(*tensors: RawTensor) -> SimpleNamespace:
    return SimpleNamespace(path="model.gguf", tensor={raw.name: raw for raw in tensors}.__getitem__)


def test_pack_tensors_merges_neighbours_of_one_format() -> None:
    tensors = [
        random_raw("Q4_1", 48, 64, 0, "q"),
        random_raw("Q4_K", 16, 256, 1, "other_width"),
        random_raw("Q4_1", 32, 64, 2, "k"),
        random_raw("Q8_0", 16, 64, 3, "v"),
        random_raw("Q8_0", 20, 64, 4, "odd"),
        random_raw("Q8_0", 16, 64, 5, "last"),
    ]
    names = ["q", "k", "v", "odd", "last"]
    permutation = rope_permutation(3, 16, 16)
    arena = WeightArena()
    released: list[int] = []
    matrices = pack_tensors(
        checkpoint_of(*tensors),
        names,
        "native",
        permutations={"q": permutation},
        num_threads=2,
        arena=arena,
        release=lambda data: released.append(data.size),
    )
    assert [(m.name, m.num_outputs, str(m.format)) for m in matrices] == [
        ("q+k", 80, "u4g32m"),
        ("v", 16, "i8g32"),
        ("odd", 20, "i8g32"),
        ("last", 16, "i8g32"),
    ]
    by_name = {raw.name: dequantize(raw) for raw in tensors}
    by_name["q"] = by_name["q"][permutation]
    expected = np.concatenate([by_name[name] for name in names])
    assert np.array_equal(np.concatenate([unpack(matrix) for matrix in matrices]), expected)
    assert all(
        m.data.size == m.format.matrix_bytes(m.num_outputs, 64) and m.data.ctypes.data % 64 == 0 for m in matrices
    )
    assert arena.taken_bytes == sum(m.data.size for m in matrices)
    assert sum(released) == sum(raw.data.size for raw in tensors if raw.name in names)


def test_pack_tensors_merges_only_what_has_one_order_of_inputs() -> None:
    order = np.random.default_rng(6).permutation(128).astype(np.int32)
    orders = {"a": order, "b": order.copy(), "c": None, "d": order[::-1].copy()}
    tensors = [replace(random_raw("Q4G64Z", 16, 128, i, name), order=o) for i, (name, o) in enumerate(orders.items())]
    matrices = pack_tensors(checkpoint_of(*tensors), list(orders), "native", num_threads=1)
    assert [matrix.name for matrix in matrices] == ["a+b", "c", "d"]
    assert [None if matrix.order is None else matrix.order.tolist() for matrix in matrices] == [
        order.tolist(),
        None,
        order[::-1].tolist(),
    ]
    expected = np.concatenate([dequantize(raw) for raw in tensors])
    assert np.array_equal(np.concatenate([unpack(matrix) for matrix in matrices]), expected)
    (matrix,) = pack_tensors(checkpoint_of(*tensors), list(orders), "f32", num_threads=1)
    assert (matrix.name, matrix.order) == ("a+b+c+d", None)
    assert np.array_equal(unpack(matrix), expected)
    (rounded, *_) = pack_tensors(checkpoint_of(*tensors), list(orders), "int8", num_threads=1)
    assert np.array_equal(rounded.order, order)
    assert np.abs(unpack(rounded) - expected[:32]).max() <= np.abs(expected[:32]).max() / 250


def test_an_order_that_is_none_is_refused() -> None:
    raw = replace(random_raw("Q4G64", 16, 128), order=np.zeros(128, np.int32))
    with pytest.raises(CheckpointError, match=r"'t'.*no permutation of 128"):
        pack_tensors(checkpoint_of(raw), ["t"], "native", num_threads=1)


def test_inputs_whose_sums_could_overflow_are_refused() -> None:
    num_inputs = -(-MAX_CHANNEL_INPUTS // 32) * 32
    assert MAX_CHANNEL_INPUTS * 128 * 127 < 2**31 <= num_inputs * 128 * 127
    raw = random_raw("Q8C", 1, num_inputs)
    with pytest.raises(UnsupportedError, match=r"'t' has 132128 inputs.*at most 132104"):
        pack_tensors(checkpoint_of(raw), ["t"], "native", num_threads=1)
    assert pack_tensors(checkpoint_of(raw), ["t"], "int8", num_threads=1)[0].format == CHOSEN_FORMATS["int8"]


def test_pack_tensors_splits_a_large_tensor_into_released_parts() -> None:
    raw = random_raw("F32", 2500, 1000)  # 10 MB: more than one part of 8 MB
    released: list[int] = []
    (matrix,) = pack_tensors(
        checkpoint_of(raw), ["t"], "int8", num_threads=2, release=lambda data: released.append(data.size)
    )
    assert len(released) == 2
    assert sum(released) == raw.data.size
    assert np.array_equal(matrix.data, pack_raw(raw, CHOSEN_FORMATS["int8"]))


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_pack_tensors_merges_what_rounding_makes_alike(weights: str) -> None:
    tensors = [random_raw(kind, 16, 256, seed, kind) for seed, kind in enumerate(("F16", "Q4_K", "Q6_K"))]
    (matrix,) = pack_tensors(checkpoint_of(*tensors), ["F16", "Q4_K", "Q6_K"], weights, num_threads=1)
    assert matrix.format == CHOSEN_FORMATS[weights]
    expected = np.concatenate([pack_raw(raw, matrix.format) for raw in tensors])
    assert np.array_equal(matrix.data, expected)


def test_pack_tensors_names_the_tensor_that_is_not_finite() -> None:
    good = random_raw("F16", 16, 64, 0, "good")
    bad = RawTensor("bad", (16, 64), "F16", np.full(16 * 64, np.inf, np.float16).view(np.uint8))
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'bad'.*not a number"):
        pack_tensors(checkpoint_of(good, bad), ["good", "bad"], "native", num_threads=1)
