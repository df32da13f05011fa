"""Kernels compile for GPUs that need not be there, keep their numbers in registers, and use tensor cores."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from int4_matrices import gguf, quantized
from launches import Compiled, record

from paceline.executors.triton import gemv_int4 as products
from paceline.executors.triton import paged_attention as attention
from paceline.executors.triton.attention_rows import AttentionRows
from paceline.executors.triton.int4_layout import pack_quantized, pack_tensor

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SMALLEST_SHARED_BYTES = 99 * 1024
"""That a program may have on an RTX 30, 40 or 50; an A100 has 163 kB and an H100 227 kB."""


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled before counts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def check(code: Compiled) -> None:
    """Nothing spilled to memory but a few addresses, and room for two programs on a multiprocessor."""
    assert code.stack_bytes <= 8
    assert code.shared_bytes <= SMALLEST_SHARED_BYTES // 1.5


@pytest.mark.parametrize(
    ("arch", "kind", "offset"),
    [
        (80, torch.bfloat16, "zero"),
        (90, torch.bfloat16, "middle"),
        (120, torch.float16, "minimum"),
        (90, torch.float32, "minimum"),
    ],
)
def test_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: int, kind: torch.dtype, offset: str) -> None:
    launches = record(monkeypatch, products.product_kernel, products.merge_kernel)
    packed = {
        "middle": lambda: pack_quantized(quantized(64, 2048, 128, zero=8), "w"),
        "zero": lambda: pack_quantized(quantized(64, 2048, 64), "w"),
        "minimum": lambda: pack_tensor(gguf("Q4_1", 64, 2048)),
    }[offset]()
    products.gemv_int4(torch.zeros(16, 2048, dtype=kind), products.Int4Matrix.of(packed, "cpu"))
    product, merge = (launch.compile(arch, tmp_path) for launch in launches)
    check(product)
    check(merge)
    assert "HMMA" in product.assembly, "tensor cores multiply"
    assert "LDGSTS" in product.assembly, "weights are fetched ahead"


@pytest.mark.parametrize(
    ("arch", "kind", "pages", "dim"),
    [
        (80, torch.float32, torch.bfloat16, 128),
        (90, torch.bfloat16, torch.bfloat16, 64),
        (90, torch.bfloat16, torch.bfloat16, 256),
        (120, torch.float32, torch.float16, 128),
        (90, torch.float32, torch.bfloat16, 256),
    ],
)
def test_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: int, kind: torch.dtype, pages: torch.dtype, dim: int
) -> None:
    launches = record(monkeypatch, attention.split_kernel, attention.merge_kernel)
    attention.paged_attention(
        torch.zeros(3, 32, dim, dtype=kind),
        *torch.zeros(2, 4, 8, 32, dim, dtype=pages),
        AttentionRows.of(
            np.array([900, 1999, 2000], np.int32),
            np.array([0, 1, 3], np.int32),
            np.zeros((2, 64), np.int32),
            group=4,
            device=torch.device("cpu"),
        ),
        window=500 if dim == 64 else None,
        softcap=50.0 if dim == 256 else None,
        sinks=torch.zeros(32) if dim == 64 else None,
    )
    splits, merge = (launch.compile(arch, tmp_path) for launch in launches)
    check(splits)
    check(merge)
    assert "HMMA" in splits.assembly, "tensor cores multiply"


def test_what_does_not_fit_into_registers_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(products, "TILE_ROWS", 256)
    launches = record(monkeypatch, products.product_kernel)
    packed = pack_quantized(quantized(32, 128, 128), "w")
    products.gemv_int4(torch.zeros(16, 128), products.Int4Matrix.of(packed, "cpu"))
    with pytest.raises(AssertionError):
        check(launches[0].compile(90, tmp_path))
