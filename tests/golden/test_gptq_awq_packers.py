"""Planes that GPTQModel's and AutoAWQ's own layers pack: the same planes as ours, and the same weights, bit for bit.

Neither library installs beside the torch of the other tests (``make interchange`` makes an environment with them), so
these are skipped where they are missing; tests/unit/test_gptq_planes.py and test_awq_planes.py need no library.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.weights import awq, gptq
from paceline.weights.awq import AWQLayout
from paceline.weights.gptq import GPTQLayout
from paceline.weights.planes import Planes
from paceline.weights.quantized_matrix import QuantizedMatrix

pytestmark = pytest.mark.timeout(900)  # GPTQModel compiles an extension when it is first used
GROUP = 32


def random_matrix(bits: int, *, zero_from: int, shuffled: bool = False) -> QuantizedMatrix:
    """64 outputs of 128 inputs with scales near 1/100, which their packers can divide by."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (64, 128), np.uint8)
    scale = random.uniform(0.005, 0.02, (64, 4)).astype(np.float16)
    zero = random.integers(zero_from, 1 << bits, (64, 4)).astype(np.uint8)
    zero[0, 0] = zero_from
    order = np.argsort(random.permutation(np.repeat(np.arange(4), GROUP)), kind="stable") if shuffled else None
    return QuantizedMatrix(codes, scale, zero, bits, GROUP, order=None if order is None else order.astype(np.int32))


def linear_of(matrix: QuantizedMatrix) -> torch.nn.Linear:
    linear = torch.nn.Linear(128, 64, bias=False)
    linear.weight.data = torch.from_numpy(matrix.values())
    return linear


def planes_of(layer: Any, names: tuple[str, ...]) -> Planes:
    return Planes("file", "layer", {name: getattr(layer, name).numpy() for name in names})


def as_half(values: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values).half()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", gptq.BITS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_planes_of_gptqmodel(bits: int, version: Literal[1, 2], shuffled: bool) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    matrix = random_matrix(bits, zero_from=0, shuffled=shuffled)
    layer = TorchLinear(
        bits=bits,
        group_size=GROUP,
        sym=False,
        desc_act=shuffled,
        in_features=128,
        out_features=64,
        bias=False,
        pack_dtype=torch.int32,
        format=FORMAT.GPTQ_V2,
        register_buffers=True,
    )
    ours = gptq.pack(matrix, version=version)
    scale, zero = torch.from_numpy(matrix.scale).float(), torch.from_numpy(matrix.zero).float()
    layer.pack(linear_of(matrix), scale, zero, torch.from_numpy(ours["g_idx"]))
    layer.post_init()
    expected = layer.dequantize_weight().T
    if version == 1:
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=GROUP))
    planes = planes_of(layer, ("qweight", "qzeros", "scales", "g_idx"))
    for name, array in ours.items():
        assert np.array_equal(planes.arrays[name], array), name
    found = GPTQLayout(bits, GROUP, version).unpack(planes)
    assert torch.equal(as_half(found.values()), expected.half())


def test_planes_of_autoawq() -> None:
    pytest.importorskip("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    matrix = random_matrix(4, zero_from=0)
    scale, zero = torch.from_numpy(matrix.scale), torch.from_numpy(matrix.zero)
    layer = WQLinear_GEMM.from_linear(linear_of(matrix), 4, GROUP, scales=scale.T.float(), zeros=zero.T.float())
    planes = planes_of(layer, AWQLayout.required)
    for name, array in awq.pack(matrix).items():
        assert np.array_equal(planes.arrays[name], array), name
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP).T
    assert torch.equal(as_half(AWQLayout(GROUP).unpack(planes).values()), expected)
