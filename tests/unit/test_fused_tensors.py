"""Files that hold several matrices of a layer as one (Phi-3): each is its rows, in every format, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from quantized_directories import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, Planes, plain_tensors, write
from quantized_matrices import random_matrix

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights import awq, compressed_tensors, gptq
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import Checkpoint

Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
FUSED = {
    "self_attn.qkv_proj": ("attn_qkv", {"attn_q": Q, "attn_k": KV, "attn_v": KV}, HIDDEN),
    "mlp.gate_up_proj": ("ffn_up", {"ffn_gate": FFN, "ffn_up": FFN}, HIDDEN),
}
"""Module in Transformers -> in GGUF, its parts with their rows, inputs."""
WHOLE = {"self_attn.o_proj": ("attn_output", HIDDEN, Q), "mlp.down_proj": ("ffn_down", HIDDEN, FFN)}
CLASS = {"architectures": ["Phi3ForCausalLM"]}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(form: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"type": "int"} | weights, "input_activations": inputs}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return common | {"format": form, "config_groups": {"group_0": scheme}}


ROUNDED = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
CASES: dict[str, tuple[dict[str, Any], Callable[[QuantizedMatrix], Planes], dict[str, Any]]] = {
    "gptq in an order of inputs": (GPTQ | {"desc_act": True}, gptq.pack, {"shuffled": True}),
    "gptq 3 bits": (GPTQ | {"bits": 3}, gptq.pack, {"bits": 3}),
    "awq": (AWQ, awq.pack, {}),
    "compressed-tensors": (compressed("pack-quantized", None, **GROUPS), compressed_tensors.pack, {}),
    "int8 activations": (
        compressed("int-quantized", ROUNDED, num_bits=8, strategy="channel", symmetric=True),
        compressed_tensors.pack_int8,
        {"bits": 8, "symmetric": True, "per_token": True},
    ),
}


def matrix_of(seed: int, outputs: int, inputs: int, kind: dict[str, Any]) -> QuantizedMatrix:
    size = inputs if kind.get("per_token") else 32
    return random_matrix(seed, outputs, inputs // size, group=size, **kind)


def rows_of(matrix: QuantizedMatrix, begin: int, count: int) -> QuantizedMatrix:
    rows = slice(begin, begin + count)
    return replace(matrix, codes=matrix.codes[rows], scale=matrix.scale[rows], zero=matrix.zero[rows])


def assert_is(checkpoint: Checkpoint, name: str, matrix: QuantizedMatrix) -> None:
    expected, header, found = matrix.blocks(name), checkpoint.header(name), checkpoint.tensor(name)
    assert (header.shape, header.kind) == (found.shape, found.kind) == (expected.shape, expected.kind)
    assert np.array_equal(found.data, expected.data)
    assert np.array_equal(found.order, expected.order) if found.order is not None else expected.order is None


@pytest.mark.parametrize("case", CASES)
def test_parts_of_quantised_modules(tmp_path: Path, case: str) -> None:
    quantization, pack, kind = CASES[case]
    tensors, expected = plain_tensors(), {}
    for layer in range(LAYERS):
        for index, (module, (_, parts, inputs)) in enumerate(FUSED.items()):
            whole = matrix_of(10 * layer + index, sum(parts.values()), inputs, kind)
            begin = 0
            for part, count in parts.items():
                expected[f"blk.{layer}.{part}.weight"] = rows_of(whole, begin, count)
                begin += count
            tensors |= {f"model.layers.{layer}.{module}.{plane}": array for plane, array in pack(whole).items()}
        for index, (module, (ours, outputs, inputs)) in enumerate(WHOLE.items()):
            matrix = matrix_of(10 * layer + 5 + index, outputs, inputs, kind)
            expected[f"blk.{layer}.{ours}.weight"] = matrix
            tensors |= {f"model.layers.{layer}.{module}.{plane}": array for plane, array in pack(matrix).items()}
    checkpoint = open_checkpoint(write(tmp_path, tensors, quantization, **CLASS))
    assert len(checkpoint.names()) == len(expected) + len(plain_tensors())
    for name, matrix in expected.items():
        assert_is(checkpoint, name, matrix)


def test_a_part_has_the_kind_of_its_own_zero_points(tmp_path: Path) -> None:
    """Keys of middle zero points between queries and values of others."""
    tensors = plain_tensors()
    for layer in range(LAYERS):
        for module, (_, parts, inputs) in FUSED.items():
            whole = matrix_of(layer, sum(parts.values()), inputs, {})
            whole.zero[Q : Q + KV] = 8
            tensors |= {f"model.layers.{layer}.{module}.{plane}": array for plane, array in gptq.pack(whole).items()}
        for module, (_, outputs, inputs) in WHOLE.items():
            matrix = matrix_of(layer, outputs, inputs, {})
            tensors |= {f"model.layers.{layer}.{module}.{plane}": array for plane, array in gptq.pack(matrix).items()}
    checkpoint = open_checkpoint(write(tmp_path, tensors, GPTQ, **CLASS))
    for part, kind in (("attn_q", "Q4G32Z"), ("attn_k", "Q4_0"), ("attn_v", "Q4G32Z")):
        name = f"blk.1.{part}.weight"
        assert checkpoint.header(name).kind == checkpoint.tensor(name).kind == kind


# ---- plain tensors ----


def plain_layers(*, fused: bool = True) -> Planes:
    random = np.random.default_rng(3)
    tensors = plain_tensors()
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        for module, (_, parts, inputs) in FUSED.items():
            whole = random.standard_normal((sum(parts.values()), inputs)).astype(np.float32)
            if fused:
                tensors[f"{p}.{module}.weight"] = whole
                continue
            names = ("q_proj", "k_proj", "v_proj") if "attn" in module else ("gate_proj", "up_proj")
            cuts = np.cumsum(list(parts.values()))[:-1]
            for name, part in zip(names, np.split(whole, cuts), strict=True):
                tensors[f"{p}.{module.split('.')[0]}.{name}.weight"] = np.ascontiguousarray(part)
        for module, (_, outputs, inputs) in WHOLE.items():
            tensors[f"{p}.{module}.weight"] = random.standard_normal((outputs, inputs)).astype(np.float32)
    return tensors


def values_of(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    return dequantize(checkpoint.tensor(name))


def test_parts_of_a_plain_matrix_are_views_one_after_the_other(tmp_path: Path) -> None:
    tensors = plain_layers()
    checkpoint = open_checkpoint(write(tmp_path, tensors, None, **CLASS))
    for module, (_, parts, _) in FUSED.items():
        names = [f"blk.1.{part}.weight" for part in parts]
        found = np.concatenate([values_of(checkpoint, name) for name in names])
        assert np.array_equal(found, tensors[f"model.layers.1.{module}.weight"])
        raws = [checkpoint.tensor(name).data for name in names]
        for before, after in pairwise(raws):
            assert before.ctypes.data + before.nbytes == after.ctypes.data


def test_a_file_may_hold_them_apart(tmp_path: Path) -> None:
    together = open_checkpoint(write(tmp_path / "together", plain_layers(), None, **CLASS))
    apart = open_checkpoint(write(tmp_path / "apart", plain_layers(fused=False), None, **CLASS))
    assert set(together.names()) == set(apart.names())
    for name in together.names():
        assert np.array_equal(together.tensor(name).data, apart.tensor(name).data)


@pytest.mark.parametrize("rows", [Q + 2 * KV + 1, Q, 1])
def test_another_number_of_rows_is_named(tmp_path: Path, rows: int) -> None:
    tensors = plain_layers() | {"model.layers.1.self_attn.qkv_proj.weight": np.zeros((rows, HIDDEN), np.float32)}
    with pytest.raises(
        CheckpointError, match=rf"has {rows} rows, expected {Q + 2 * KV}: blk.1.attn_q.weight"
    ) as caught:
        open_checkpoint(write(tmp_path, tensors, None, **CLASS))
    assert caught.value.tensor == "blk.1.attn_qkv.weight"


def test_parts_that_are_there_twice_are_named(tmp_path: Path) -> None:
    tensors = plain_layers() | {"model.layers.0.self_attn.k_proj.weight": np.zeros((KV, HIDDEN), np.float32)}
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_k\.weight': occurs twice"):
        open_checkpoint(write(tmp_path, tensors, None, **CLASS))


def test_other_families_have_no_such_tensors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp\.gate_up_proj\.weight' has no place"):
        open_checkpoint(write(tmp_path, plain_layers() | plain_layers(fused=False), None))


# ---- GGUF ----


def write_gguf(path: Path, extra: dict[str, NDArray[Any]] | None = None) -> tuple[Path, Planes]:
    """Matrices of Q8_0 whose rows are blocks; returns the fused ones' bytes too."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "phi3")
    keys = {"block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": FFN}
    keys |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM}
    for key, value in keys.items():
        writer.add_uint32(f"phi3.{key}", value)
    writer.add_float32("phi3.attention.layer_norm_rms_epsilon", 1e-5)
    fused: Planes = {}
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{ours}": (sum(parts.values()), inputs) for ours, parts, inputs in FUSED.values()}
        shapes |= {f"blk.{layer}.{ours}": (outputs, inputs) for ours, outputs, inputs in WHOLE.values()}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        fused[name] = blocks
    norms = ["output_norm", *(f"blk.{i}.{norm}" for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", random.standard_normal(HIDDEN).astype(np.float32))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, fused


def test_parts_of_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    path, written = write_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.interleaved_rope is False
    for ours, parts, inputs in FUSED.values():
        tensors = [checkpoint.tensor(f"blk.1.{part}.weight") for part in parts]
        assert [tensor.shape for tensor in tensors] == [(count, inputs) for count in parts.values()]
        assert {tensor.kind for tensor in tensors} == {"Q8_0"}
        assert np.array_equal(np.concatenate([tensor.data for tensor in tensors]), written[f"blk.1.{ours}"].reshape(-1))


def test_parts_of_a_gguf_file_that_are_there_twice_are_named(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_v.weight": np.zeros((KV, HIDDEN), np.float32)})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_v\.weight': occurs twice"):
        open_checkpoint(path)
