"""Directories with quantised weights: every matrix is the one that was written, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from quantized_directories import (
    HIDDEN,
    Planes,
    canonical,
    layer_names,
    plain_tensors,
    random_matrices,
    tensors_of,
    write,
)
from quantized_matrices import random_matrix

from paceline.config import EngineConfig
from paceline.engine.memory import weight_bytes
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights import awq, compressed_tensors, gptq
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.quantized_modules import QuantizedModule
from paceline.weights.raw import Checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(weights: dict[str, Any], form: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"type": "int"} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme | changes},
    }


GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
W8A8 = compressed(
    {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "int-quantized",
    input_activations={"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True},
)
CASES: dict[str, tuple[dict[str, Any], Callable[[QuantizedMatrix], Planes], dict[str, Any]]] = {
    "gptq v1": (GPTQ | {"checkpoint_format": "gptq"}, partial(gptq.pack, version=1), {}),
    "gptq v2": (GPTQ, gptq.pack, {}),
    "gptq in an order of inputs": (GPTQ | {"desc_act": True}, gptq.pack, {"shuffled": True}),
    "gptq 3 bits": (GPTQ | {"bits": 3}, gptq.pack, {"bits": 3}),
    "gptq 8 bits, symmetric": (GPTQ | {"bits": 8}, gptq.pack, {"bits": 8, "symmetric": True}),
    "awq": (AWQ, awq.pack, {}),
    "compressed-tensors": (compressed(GROUPS), compressed_tensors.pack, {}),
    "compressed-tensors symmetric": (
        compressed(GROUPS | {"symmetric": True}),
        compressed_tensors.pack,
        {"symmetric": True},
    ),
    "compressed-tensors in an order of inputs": (
        compressed(GROUPS | {"actorder": "group"}),
        compressed_tensors.pack,
        {"shuffled": True},
    ),
    "compressed-tensors int8": (
        compressed(GROUPS | {"num_bits": 8}, "int-quantized"),
        compressed_tensors.pack_int8,
        {"bits": 8},
    ),
}


def assert_is(checkpoint: Checkpoint, name: str, matrix: QuantizedMatrix) -> None:
    expected = matrix.blocks(name)
    header, found = checkpoint.header(name), checkpoint.tensor(name)
    assert (header.shape, header.kind) == (found.shape, found.kind) == (expected.shape, expected.kind)
    assert np.array_equal(found.data, expected.data)
    assert (found.order is None) == (expected.order is None)
    assert found.order is None or np.array_equal(found.order, expected.order)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_the_one_that_was_written(tmp_path: Path, case: str) -> None:
    quantization, pack, kind = CASES[case]
    matrices = random_matrices(**kind)
    checkpoint = open_checkpoint(write(tmp_path, tensors_of(matrices, pack), quantization))
    plain = plain_tensors()
    assert len(checkpoint.names()) == len(matrices) + len(plain)
    for module, matrix in matrices.items():
        assert_is(checkpoint, canonical(module), matrix)
    for name, values in plain.items():
        tensor = checkpoint.tensor(canonical(name.removesuffix(".weight")))
        assert np.array_equal(tensor.data.view(np.float32).reshape(values.shape), values)


def test_weights_for_int8_activations(tmp_path: Path) -> None:
    matrices = {
        module: random_matrix(seed, shape[0], 1, bits=8, group=shape[1], symmetric=True, per_token=True)
        for seed, (module, shape) in enumerate(layer_names().items())
    }
    checkpoint = open_checkpoint(write(tmp_path, tensors_of(matrices, compressed_tensors.pack_int8), W8A8))
    for module, matrix in matrices.items():
        assert_is(checkpoint, canonical(module), matrix)
        assert checkpoint.header(canonical(module)).kind == "Q8C"


def test_scales_may_be_bf16(tmp_path: Path) -> None:
    """Written as u16, whose type the header then says is BF16."""
    matrices = random_matrices()
    tensors = tensors_of(matrices, compressed_tensors.pack)
    for name in tensors:
        if name.endswith("weight_scale"):
            wide = np.round(tensors[name].astype(np.float32) * 64).clip(-127, 127) / np.float32(64)
            tensors[name] = (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            module = name.removesuffix(".weight_scale")
            matrices[module] = QuantizedMatrix(
                matrices[module].codes, wide.astype(np.float16), matrices[module].zero, 4, 32
            )
    write(tmp_path, tensors, compressed(GROUPS))
    content = (tmp_path / "model.safetensors").read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    header = content[8:data_start].replace(b'"U16"', b'"BF16"')
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[data_start:])
    checkpoint = open_checkpoint(tmp_path)
    for module, matrix in matrices.items():
        assert_is(checkpoint, canonical(module), matrix)


def test_planes_may_lie_in_several_files(tmp_path: Path) -> None:
    matrices = random_matrices()
    tensors = tensors_of(matrices, gptq.pack)
    write(tmp_path, {}, GPTQ)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{at % 2}.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    checkpoint = open_checkpoint(tmp_path)
    assert {file.name for file in checkpoint.files} == {"config.json", "model-0.safetensors", "model-1.safetensors"}
    for module, matrix in matrices.items():
        assert_is(checkpoint, canonical(module), matrix)


def test_layers_and_head_may_be_quantised_or_not(tmp_path: Path) -> None:
    matrices = random_matrices()
    tensors = tensors_of(matrices, gptq.pack)
    plain = "model.layers.1.mlp.down_proj"
    for name in [name for name in tensors if name.startswith(plain)]:
        del tensors[name]
    tensors[f"{plain}.weight"] = np.ones((HIDDEN, 96), np.float16)
    del tensors["lm_head.weight"]
    head = random_matrix(99, 48, 2)
    tensors |= {f"lm_head.{plane}": array for plane, array in gptq.pack(head).items()}
    checkpoint = open_checkpoint(write(tmp_path, tensors, GPTQ | {"lm_head": True}))
    assert checkpoint.header(canonical(plain)).kind == "F16"
    assert_is(checkpoint, "output.weight", head)
    with pytest.raises(UnsupportedError, match="tie_word_embeddings is true, but lm_head has codes of its own"):
        open_checkpoint(write(tmp_path, tensors, GPTQ, tie_word_embeddings=True))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_be_quantised(tmp_path: Path, tied: bool) -> None:
    matrices = random_matrices() | {"model.embed_tokens": random_matrix(98, 48, 2), "lm_head": random_matrix(99, 48, 2)}
    if tied:
        del matrices["lm_head"]
    tensors = tensors_of(matrices, compressed_tensors.pack)
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    quantization = compressed(GROUPS, targets=["Linear", "Embedding"]) | {"ignore": []}
    checkpoint = open_checkpoint(write(tmp_path, tensors, quantization, tie_word_embeddings=tied))
    assert_is(checkpoint, "token_embd.weight", matrices["model.embed_tokens"])
    assert ("output.weight" in checkpoint.names()) is not tied


def test_biases_of_zeros_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    tensors = tensors_of(random_matrices(), gptq.pack)
    biases = {f"{module}.bias": np.zeros(shape[0], np.float16) for module, shape in layer_names().items()}
    checkpoint = open_checkpoint(write(tmp_path, tensors | biases, GPTQ))
    assert not any(name.endswith(".bias") for name in checkpoint.names())
    biases["model.layers.1.mlp.up_proj.bias"][3] = 1e-4
    with pytest.raises(UnsupportedError, match=r"tensor 'blk.1.ffn_up.bias' has no place in the llama architecture"):
        open_checkpoint(write(tmp_path, tensors | biases, GPTQ))


def test_biases_that_the_architecture_has_are_kept_even_when_they_are_zeros(tmp_path: Path) -> None:
    tensors = tensors_of(random_matrices(), gptq.pack)
    biases = {
        f"{module}.bias": np.full(shape[0], seed % 2, np.float16)
        for seed, (module, shape) in enumerate(layer_names().items())
        if module[-6:] in ("q_proj", "k_proj", "v_proj")
    }
    write(tmp_path, tensors | biases, GPTQ, architectures=["Qwen2ForCausalLM"])
    checkpoint = open_checkpoint(tmp_path)
    assert sum(name.endswith(".bias") for name in checkpoint.names()) == 6
    del biases["model.layers.1.self_attn.v_proj.bias"]
    with pytest.raises(CheckpointError, match=r"'blk.1.attn_v.bias': missing"):
        open_checkpoint(write(tmp_path, tensors | biases, GPTQ, architectures=["Qwen2ForCausalLM"]))


@pytest.mark.parametrize(
    ("case", "plane"),
    [
        ("gptq v2", "scales"),
        ("gptq v2", "qzeros"),
        ("gptq in an order of inputs", "g_idx"),
        ("awq", "qzeros"),
        ("compressed-tensors", "weight_scale"),
        ("compressed-tensors", "weight_shape"),
        ("compressed-tensors", "weight_zero_point"),
        ("compressed-tensors in an order of inputs", "weight_g_idx"),
        ("compressed-tensors int8", "weight_scale"),
    ],
)
def test_a_missing_plane_is_found_when_the_directory_is_opened(tmp_path: Path, case: str, plane: str) -> None:
    quantization, pack, kind = CASES[case]
    tensors = tensors_of(random_matrices(**kind), pack)
    del tensors[f"model.layers.1.mlp.up_proj.{plane}"]
    with pytest.raises(CheckpointError, match=rf"safetensors: tensor 'model.layers.1.mlp.up_proj.{plane}': missing"):
        open_checkpoint(write(tmp_path, tensors, quantization))


@pytest.mark.parametrize("plane", ["weight_global_scale", "input_scale", "g_idx", "qweight_2"])
def test_a_plane_that_nothing_reads_is_refused(tmp_path: Path, plane: str) -> None:
    tensors = tensors_of(random_matrices(), compressed_tensors.pack)
    tensors[f"model.layers.0.mlp.up_proj.{plane}"] = np.ones(1, np.float32)
    with pytest.raises(UnsupportedError, match=rf"up_proj.{plane}' has no place beside codes; Paceline reads weight_p"):
        open_checkpoint(write(tmp_path, tensors, compressed(GROUPS)))


def test_a_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    matrices = random_matrices() | {"model.layers.0.mlp.up_proj": random_matrix(0, 96, 3)}
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight': has shape \(96, 96\), expected \(96, 64\)"):
        open_checkpoint(write(tmp_path, tensors_of(matrices, gptq.pack), GPTQ))


def test_codes_without_a_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is I32; Paceline reads F32, F16, BF16"):
        open_checkpoint(write(tmp_path, tensors_of(random_matrices(), gptq.pack), None))


def test_planes_of_a_type_that_is_not_read_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(random_matrices(), gptq.pack)
    name = "model.layers.0.mlp.up_proj.qweight"
    tensors[name] = tensors[name].astype(np.int16)
    with pytest.raises(CheckpointError, match=r"up_proj.qweight': is I16, none of I8, I32"):
        open_checkpoint(write(tmp_path, tensors, GPTQ))


def test_channel_scales_of_inputs_that_blocks_cannot_hold_are_refused(tmp_path: Path) -> None:
    channel = compressed({"num_bits": 4, "strategy": "channel", "symmetric": False})
    narrow = {
        module: random_matrix(0, shape[0], 1, group=48 if shape[1] == HIDDEN else shape[1])
        for module, shape in layer_names().items()
    }
    message = "has 48 inputs with one scale for all of them; Paceline reads multiples of 32"
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(write(tmp_path, tensors_of(narrow, compressed_tensors.pack), channel))


def test_bytes_are_known_without_building_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = random_matrices(symmetric=True)
    checkpoint = open_checkpoint(write(tmp_path, tensors_of(matrices, gptq.pack), GPTQ))
    monkeypatch.setattr(QuantizedModule, "tensor", None)
    num_bytes = weight_bytes(checkpoint, EngineConfig(weights="int8"))
    matrix_weights = sum(outputs * inputs for outputs, inputs in layer_names().values())
    assert num_bytes >= matrix_weights * 34 // 32


@pytest.mark.parametrize(
    ("name", "values", "pack"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, partial(gptq.pack, version=1)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}, awq.pack),
    ],
)
def test_the_configurations_beside_config_json_of_old_writers(
    tmp_path: Path, name: str, values: dict[str, Any], pack: Callable[[QuantizedMatrix], Planes]
) -> None:
    matrices = random_matrices()
    write(tmp_path, tensors_of(matrices, pack), None)
    (tmp_path / name).write_text(json.dumps(values))
    checkpoint = open_checkpoint(tmp_path)
    assert tmp_path / name in checkpoint.files
    for module, matrix in matrices.items():
        assert_is(checkpoint, canonical(module), matrix)
