"""Experts of safetensors directories: one tensor each, quantised ones too, all in one, MXFP4; and what is wrong with
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized_directories import FFN, HIDDEN, MODULES, Planes, plain_tensors, write
from quantized_matrices import random_matrix

from paceline.errors import CheckpointError, PacelineError, UnsupportedError
from paceline.weights import gptq
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.packing import drop_file_pages

EXPERTS = 3
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
GPT_OSS = MIXTRAL | {"architectures": ["GptOssForCausalLM"], "attention_bias": False, "sliding_window": 9}
W1 = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"


def layer_of_attention(layer: int, random: np.random.Generator) -> Planes:
    matrices = {name: shape for name, shape in MODULES.items() if name.startswith("self_attn")}
    return {
        f"model.layers.{layer}.{name}.weight": random.standard_normal(shape).astype(np.float32)
        for name, shape in matrices.items()
    }


def mixtral() -> Planes:
    """All tensors, one for each expert."""
    random = np.random.default_rng(0)
    tensors = plain_tensors()
    for layer in range(2):
        tensors |= layer_of_attention(layer, random)
        p = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{p}.gate.weight"] = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
        for expert in range(EXPERTS):
            for name, shape in (("w1", (FFN, HIDDEN)), ("w3", (FFN, HIDDEN)), ("w2", (HIDDEN, FFN))):
                tensors[f"{p}.experts.{expert}.{name}.weight"] = random.standard_normal(shape).astype(np.float32)
    return tensors


def gpt_oss() -> Planes:
    """All tensors, experts in MXFP4."""
    random = np.random.default_rng(1)
    tensors = plain_tensors()
    for layer in range(2):
        tensors |= layer_of_attention(layer, random)
        p = f"model.layers.{layer}"
        shapes = {"mlp.router.weight": (EXPERTS, HIDDEN), "mlp.router.bias": (EXPERTS,), "self_attn.sinks": (4,)}
        shapes |= {"mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * FFN), "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN)}
        tensors |= {f"{p}.{name}": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for name, (outputs, inputs) in (("gate_up_proj", (2 * FFN, HIDDEN)), ("down_proj", (HIDDEN, FFN))):
            blocks = random.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=np.uint8)
            tensors[f"{p}.mlp.experts.{name}_blocks"] = blocks
            tensors[f"{p}.mlp.experts.{name}_scales"] = random.integers(120, 126, blocks.shape[:3], dtype=np.uint8)
    return tensors


def test_one_tensor_an_expert(tmp_path: Path) -> None:
    tensors = mixtral()
    checkpoint = open_checkpoint(write(tmp_path, tensors, ..., **MIXTRAL))  # type: ignore[arg-type]
    for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        raw = checkpoint.tensor(f"blk.1.ffn_{part}_exps.weight")
        expected = [tensors[W1.format(1, expert).replace("w1", own)] for expert in range(EXPERTS)]
        assert np.array_equal(dequantize(raw), np.stack(expected))
        assert checkpoint.header(raw.name).shape == raw.shape
        assert raw.name == f"blk.1.ffn_{part}_exps.weight"
        drop_file_pages(raw.data)  # a copy: nothing is given back
        assert np.array_equal(dequantize(raw), np.stack(expected))


def test_quantised_experts(tmp_path: Path) -> None:
    """GPTQ: each expert a module with codes; routers are left alone."""
    tensors, expected = mixtral(), {}
    for name in [name for name in tensors if ".experts." in name]:
        outputs, inputs = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        matrix = random_matrix(len(expected), outputs, inputs // 32, symmetric=True)
        expected[module] = matrix.values()
        tensors |= {f"{module}.{plane}": array for plane, array in gptq.pack(matrix).items() if plane != "g_idx"}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    checkpoint = open_checkpoint(write(tmp_path, tensors, settings, **MIXTRAL))
    raw = checkpoint.tensor("blk.0.ffn_gate_exps.weight")
    assert raw.kind == checkpoint.header(raw.name).kind == "Q4_0"
    found = dequantize(raw)
    for expert in range(EXPERTS):
        assert np.array_equal(found[expert], expected[W1.format(0, expert).removesuffix(".weight")])


def e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -magnitude if sign else magnitude


def test_values_of_mxfp4(tmp_path: Path) -> None:
    """A sign, two bits of exponent and one of mantissa, times a power of two for 32 inputs."""
    tensors = gpt_oss()
    checkpoint = open_checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"}, **GPT_OSS))
    blocks = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    scales = tensors["model.layers.1.mlp.experts.gate_up_proj_scales"]
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.array([e2m1(code) for code in range(16)])[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
    values = values.reshape(EXPERTS, -1, HIDDEN)
    for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        raw = checkpoint.tensor(f"blk.1.ffn_{part}_exps.weight")
        assert np.array_equal(dequantize(raw), values[:, rows])
        bias = checkpoint.tensor(f"blk.1.ffn_{part}_exps.bias")
        fused = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"]
        assert np.array_equal(bias.data.view(np.float32).reshape(EXPERTS, FFN), fused[:, rows])


def _changed(tensors: Planes, changes: dict[str, Any]) -> Planes:
    """None removes a tensor."""
    return {name: array for name, array in (tensors | changes).items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({W1.format(1, 2): None}, CheckpointError, r"experts\.2\.w1\.weight.*missing"),
        ({W1.format(1, 0): None}, CheckpointError, r"blk\.1\.ffn_gate_exps\.weight.*missing"),
        ({W1.format(1, EXPERTS): np.zeros((FFN, HIDDEN), np.float32)}, UnsupportedError, r"experts\.3\.w1.* no place"),
        ({W1.format(1, 1): np.zeros((FFN, HIDDEN), np.float16)}, UnsupportedError, "experts of one layer differ: F16"),
        ({W1.format(1, 1): np.zeros((FFN, HIDDEN - 1), np.float32)}, UnsupportedError, "experts of one layer differ"),
        ({W1.format(1, 0): np.zeros((FFN, HIDDEN - 1), np.float32)}, CheckpointError, "has shape"),
        ({W1.format(1, 1): np.zeros((FFN, HIDDEN), np.int32)}, UnsupportedError, r"experts\.1\.w1\.weight' is I32"),
        ({"model.layers.0.block_sparse_moe.gate.weight": None}, CheckpointError, r"blk\.0\.ffn_gate_inp\.weight"),
    ],
)
def test_what_is_wrong_with_single_experts(
    changes: dict[str, Any], error: type[PacelineError], words: str, tmp_path: Path
) -> None:
    write(tmp_path, _changed(mixtral(), changes), ..., **MIXTRAL)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path).tensor("blk.1.ffn_gate_exps.weight")


BLOCKS, SCALES = (f"model.layers.1.mlp.experts.gate_up_proj_{plane}" for plane in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({SCALES: None}, "gate_up_proj_scales.*missing"),
        ({SCALES: np.zeros((EXPERTS, 2 * FFN, 3), np.uint8)}, "gate_up_proj_scales.*no plane of MXFP4"),
        ({BLOCKS: np.zeros((EXPERTS, 2 * FFN, 2, 15), np.uint8)}, "gate_up_proj_blocks.*no plane of MXFP4"),
        ({BLOCKS: np.zeros((EXPERTS, 2 * FFN, 2, 16), np.int8)}, "gate_up_proj_blocks.*no plane of MXFP4"),
        ({BLOCKS: np.zeros(5, np.uint8)}, "gate_up_proj_blocks.*no plane of MXFP4"),
        ({BLOCKS.removesuffix("_blocks"): np.zeros((2, 2), np.float32), BLOCKS: None, SCALES: None}, "has shape"),
        ({"model.layers.1.self_attn.sinks": None}, r"blk\.1\.attn_sinks\.weight"),
    ],
)
def test_what_is_wrong_with_fused_experts(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, _changed(gpt_oss(), changes), {"quant_method": "mxfp4"}, **GPT_OSS)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)
