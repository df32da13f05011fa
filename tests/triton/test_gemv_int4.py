"""Products with 4-bit weights: equal to the plain product within rounding, and the same bits in every batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from int4_matrices import gguf, quantized

from paceline.executors.triton import gemv_int4 as module
from paceline.executors.triton.gemv_int4 import Int4Matrix, gemv_int4, num_splits
from paceline.executors.triton.int4_layout import PackedInt4, pack_quantized, pack_tensor

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(num_rows: int, inputs: int, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Activations."""
    torch.manual_seed(num_rows + inputs)
    return torch.randn(num_rows, inputs).to(kind).to(device)


def check(x: torch.Tensor, packed: PackedInt4) -> None:
    """Against the product in f64. Sums of K products in f32 err by less than K 2^-24 sum |x w|, and with an offset what
    is summed can be larger than the weight: |s| 15 + |o|. The result is rounded to the type of x.
    """
    y = gemv_int4(x, Int4Matrix.of(packed, x.device))
    assert y.dtype == x.dtype
    exact = x.cpu().double().numpy() @ packed.values().astype(np.float64).T
    largest = np.abs(packed.scale.astype(np.float64)).max() * 15
    if packed.offset_kind == "minimum":
        assert packed.offset is not None
        largest += np.abs(packed.offset.astype(np.float64)).max()
    bound = packed.num_inputs * 2.0**-24 * largest * np.abs(x.cpu().double().numpy()).sum(axis=1, keepdims=True)
    bound = bound + np.abs(exact) * torch.finfo(x.dtype).eps
    assert (np.abs(y.cpu().double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zero", [8, None])
def test_quantised_matrices(device: torch.device, kind: torch.dtype, group: int, zero: int | None) -> None:
    check(rows(2, 128, kind, device), pack_quantized(quantized(33, 128, group, zero=zero), "w"))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_gguf_matrices(device: torch.device, kind: torch.dtype, name: str) -> None:
    check(rows(3, 256, kind, device), pack_tensor(gguf(name, 33, 256)))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (31, 96), (33, 160), (64, 1056), (5, 576)])
def test_odd_sizes(device: torch.device, outputs: int, inputs: int) -> None:
    check(rows(3, inputs, torch.float32, device), pack_quantized(quantized(outputs, inputs, 32), "w"))


@pytest.fixture
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of inputs is worth a split, so that small matrices have some."""
    monkeypatch.setattr(module, "MIN_SPLIT_BLOCKS", 1)


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 33])
def test_numbers_of_rows(device: torch.device, num_rows: int) -> None:
    assert num_splits(40, 288) == 3
    check(rows(num_rows, 288, torch.bfloat16, device), pack_quantized(quantized(40, 288, 32), "w"))


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("inputs", [128, 288])
def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device, kind: torch.dtype, inputs: int) -> None:
    packed = pack_quantized(quantized(40, inputs, 128 if inputs == 128 else 32), "w")
    assert num_splits(40, inputs) == (1 if inputs == 128 else 3)
    matrix = Int4Matrix.of(packed, device)
    x = rows(19, inputs, kind, device)
    together = gemv_int4(x, matrix)
    for row in (0, 7, 18):
        assert torch.equal(gemv_int4(x[row : row + 1], matrix)[0], together[row])
    assert torch.equal(gemv_int4(x[5:18], matrix), together[5:18])


@pytest.mark.usefixtures("_small_splits")
def test_bias_and_scale(device: torch.device) -> None:
    for inputs in (128, 288):
        matrix = Int4Matrix.of(pack_quantized(quantized(40, inputs, 32), "w"), device)
        x, bias = rows(2, inputs, torch.float32, device), rows(1, 40, torch.float32, device)[0]
        plain = gemv_int4(x, matrix)
        assert torch.equal(gemv_int4(x, matrix, bias=bias, scale=0.5), (plain + bias) * 0.5)


def test_strided_rows(device: torch.device) -> None:
    matrix = Int4Matrix.of(pack_quantized(quantized(40, 128, 32), "w"), device)
    x = rows(2, 256, torch.float32, device)
    assert torch.equal(gemv_int4(x[:, 64:192], matrix), gemv_int4(x[:, 64:192].contiguous(), matrix))


def test_inputs_in_another_order(device: torch.device) -> None:
    matrix = quantized(40, 128, 64)
    order = np.random.default_rng(0).permutation(128).astype(np.int32)
    ordered = Int4Matrix.of(pack_quantized(replace(matrix, order=order), "w"), device)
    plain = Int4Matrix.of(pack_quantized(matrix, "w"), device)
    x = rows(2, 128, torch.float32, device)
    assert torch.equal(gemv_int4(x, ordered), gemv_int4(x[:, torch.from_numpy(order).to(device)], plain))
    assert not torch.equal(gemv_int4(x, ordered), gemv_int4(x, plain))


def test_a_wrong_code_scale_or_offset_is_seen(device: torch.device) -> None:
    packed = pack_tensor(gguf("Q4_1", 33, 256))
    assert packed.offset is not None
    x = rows(2, 256, torch.float32, device)
    for field in ("codes", "scale", "offset"):
        damaged = getattr(packed, field).copy()
        damaged.reshape(-1)[7] += 1
        found = gemv_int4(x, Int4Matrix.of(replace(packed, **{field: damaged}), device))
        with pytest.raises(AssertionError):
            assert torch.allclose(found, gemv_int4(x, Int4Matrix.of(packed, device)), atol=1e-4)


def test_the_number_of_splits_is_the_matrix_s() -> None:
    assert num_splits(14336, 4096) == 1
    assert num_splits(2048, 8192) == 2
    assert num_splits(8, 128) == 1
    assert num_splits(32, 128 * 4 * 3) == 3
