"""What configurations say: those of published models are read, and what cannot be honoured is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.awq import AWQLayout
from paceline.weights.compressed_tensors import Int8Layout, PackedLayout
from paceline.weights.gptq import GPTQLayout
from paceline.weights.planes import Layout
from paceline.weights.quantization_config import Quantization, read_quantization

CONFIG = Path("config.json")
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.11.mlp.down_proj"


def read(values: dict[str, Any], key: str = "quantization_config") -> Quantization:
    found = read_quantization(CONFIG, {key: values})
    assert found is not None
    return found


def layout(values: dict[str, Any], module: str = UP) -> Layout:
    return read(values).layout(module)


WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "group_size": 128,
    "strategy": "group",
    "block_structure": None,
    "dynamic": False,
    "actorder": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
TOKEN = WEIGHTS | {"num_bits": 8, "strategy": "token", "group_size": None, "dynamic": True, "observer": None}
CHANNEL = WEIGHTS | {"num_bits": 8, "strategy": "channel", "group_size": None}


def compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Those of a published model; changes to the group's own keys go there."""
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | (weights or {}),
        "input_activations": None,
        "output_activations": None,
    }
    group |= {key: changes.pop(key) for key in list(changes) if key in (*group, "scheme_format")}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.10.2",
    } | changes


GPTQ_CONFIG = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": True,
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:1.4.0"]},
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
AWQ_CONFIG = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


def test_models_without_one() -> None:
    assert read_quantization(CONFIG, {}) is None
    assert read_quantization(CONFIG, {"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (GPTQ_CONFIG, GPTQLayout(4, 128, 1, ordered=True)),
        (GPTQ_CONFIG | {"static_groups": True}, GPTQLayout(4, 128, 1)),
        (GPTQ_CONFIG | {"checkpoint_format": "gptq_v2", "desc_act": False, "bits": 3}, GPTQLayout(3, 128, 2)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "format": "gptq_v2"}, GPTQLayout(8, None, 2)),
        ({"quant_method": "gptq", "bits": 2}, GPTQLayout(2, 128, 1)),
        (AWQ_CONFIG, AWQLayout(128)),
        (AWQ_CONFIG | {"version": "GEMM", "group_size": -1}, AWQLayout(None)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, AWQLayout(64)),
        (compressed(), PackedLayout(4, 128, True)),
        (compressed({"symmetric": False, "actorder": "weight"}), PackedLayout(4, 128, False)),
        (compressed({"actorder": "group"}), PackedLayout(4, 128, True, ordered=True)),
        (compressed({"num_bits": 8, "strategy": "channel", "group_size": -1}), PackedLayout(8, None, True)),
        (compressed({"strategy": None, "group_size": 64}), PackedLayout(4, 64, True)),
        (compressed({"strategy": None, "group_size": -1}), PackedLayout(4, None, True)),
        (compressed(CHANNEL, format="int-quantized"), Int8Layout(8, None, True, False)),
        (compressed(CHANNEL, format="int-quantized", input_activations=TOKEN), Int8Layout(8, None, True, True)),
        (compressed(CHANNEL, format="naive-quantized"), Int8Layout(8, None, True, False)),
        (compressed(sparsity_config={"format": "dense", "ignore": []}), PackedLayout(4, 128, True)),
        (compressed(targets=[r"re:.*mlp\..*"]), PackedLayout(4, 128, True)),
        (compressed(targets=[UP]), PackedLayout(4, 128, True)),
    ],
)
def test_published_configurations_are_read(values: dict[str, Any], expected: Layout) -> None:
    assert layout(values) == expected


@pytest.mark.parametrize("values", [GPTQ_CONFIG | {"bits": 4.0}, compressed({"num_bits": 4.0})])
def test_bits_are_an_integer_however_they_are_written(values: dict[str, Any]) -> None:
    assert type(layout(values).bits) is int


def test_an_old_name_of_the_key() -> None:
    values = {key: value for key, value in compressed().items() if key != "quant_method"}
    assert read(values, "compression_config").layout(UP) == PackedLayout(4, 128, True)


def test_groups_with_formats_of_their_own() -> None:
    values = compressed(format="mixed-precision")
    four = values["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": ["re:.*down_proj"]}
    eight = four | {"format": "int-quantized", "targets": ["Linear"], "weights": CHANNEL, "input_activations": TOKEN}
    one = four | {"targets": [DOWN], "weights": WEIGHTS | {"group_size": 32}}
    values["config_groups"] = {"group_0": eight, "group_1": four, "group_2": one}
    rules = read(values)
    assert rules.layout(UP) == Int8Layout(8, None, True, True)
    assert rules.layout("model.layers.0.mlp.down_proj") == PackedLayout(4, 128, True), "a pattern goes before a class"
    assert rules.layout(DOWN) == PackedLayout(4, 32, True), "a name goes before a pattern"
    del eight["format"]
    with pytest.raises(UnsupportedError, match=r"group_0.format is 'mixed-precision'; Paceline reads pack-quantized"):
        read(values)


@pytest.mark.parametrize(
    ("changes", "module", "message"),
    [
        ({"ignore": ["lm_head", UP]}, UP, "up_proj has codes, but quantization_config.ignore leaves it alone"),
        ({"ignore": [r"re:.*layers\.0\..*"]}, UP, "ignore leaves it alone"),
        ({"targets": ["re:.*down_proj"]}, UP, "has codes, but quantization_config.config_groups has no weights for it"),
        ({}, "model.embed_tokens", "has no weights for it"),
    ],
)
def test_modules_that_have_codes_and_should_not(changes: dict[str, Any], module: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layout(compressed(**changes), module)


def test_a_group_of_activations_only_has_no_weights() -> None:
    values = compressed()
    values["config_groups"]["group_0"]["weights"] = None
    with pytest.raises(UnsupportedError, match="has no weights for it"):
        layout(values)


def test_embeddings_are_a_class_of_their_own() -> None:
    assert layout(compressed(targets=["Embedding"]), "model.embed_tokens") == PackedLayout(4, 128, True)


def test_values_of_single_modules_in_gptq() -> None:
    values = GPTQ_CONFIG | {
        "dynamic": {
            r"+:.*\.11\..*": {"bits": 8, "group_size": 64},
            r".*down_proj": {"desc_act": False},
            r"-:.*up_proj": {},
        }
    }
    rules = read(values)
    assert rules.layout(DOWN) == GPTQLayout(8, 64, 1, ordered=True)
    assert rules.layout("model.layers.0.mlp.down_proj") == GPTQLayout(4, 128, 1)
    assert rules.layout("model.layers.0.mlp.gate_proj") == GPTQLayout(4, 128, 1, ordered=True)
    with pytest.raises(UnsupportedError, match=r"up_proj has codes, but quantization_config.dynamic leaves it alone"):
        rules.layout(UP)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "fp8"}, "quantization_config.quant_method is 'fp8'; Paceline reads gptq, awq"),
        ({"bits": 4}, "quant_method is None; Paceline reads"),
        (GPTQ_CONFIG | {"bits": 5}, "bits is 5; Paceline reads 2, 3, 4, 8"),
        (GPTQ_CONFIG | {"bits": True}, "bits is True"),
        (GPTQ_CONFIG | {"bits": [4]}, r"bits is \[4\]"),
        (GPTQ_CONFIG | {"group_size": 16}, "group_size is 16; Paceline reads multiples of 32"),
        (GPTQ_CONFIG | {"group_size": 48}, "group_size is 48; Paceline reads multiples of 32"),
        (GPTQ_CONFIG | {"group_size": "128"}, "group_size is '128'"),
        (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; Paceline reads gptq, gptq_v2"),
        (GPTQ_CONFIG | {"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        (GPTQ_CONFIG | {"checkpoint_format": None, "format": "bitblas"}, "format is 'bitblas'"),
        (GPTQ_CONFIG | {"is_marlin_format": True}, "is_marlin_format: codes in the order of the Marlin kernel"),
        (GPTQ_CONFIG | {"desc_act": "no"}, "desc_act is 'no'; Paceline reads True, False"),
        (GPTQ_CONFIG | {"pack_dtype": "int16"}, "pack_dtype is 'int16'; Paceline reads int32"),
        (GPTQ_CONFIG | {"rotation": "hadamard"}, "rotation: weights that were rotated"),
        (GPTQ_CONFIG | {"adapter": {"name": "lora"}}, "adapter: an adapter"),
        (GPTQ_CONFIG | {"dynamic": {".*": {"bits": 7}}}, r"dynamic..\*.bits is 7"),
        (AWQ_CONFIG | {"version": "gemv"}, "version is 'gemv'; Paceline reads gemm"),
        (AWQ_CONFIG | {"version": "gemv_fast"}, "version is 'gemv_fast'; Paceline reads gemm"),
        (AWQ_CONFIG | {"version": "marlin"}, "version is 'marlin'; Paceline reads gemm"),
        (AWQ_CONFIG | {"version": None, "format": "llm-awq"}, "format is 'llm-awq'"),
        (AWQ_CONFIG | {"backend": "llm-awq"}, "backend is 'llm-awq'"),
        (AWQ_CONFIG | {"bits": 8}, "bits is 8; Paceline reads 4"),
        (compressed(quantization_status="frozen"), "quantization_status is 'frozen'; Paceline reads compressed"),
        (compressed(kv_cache_scheme=TOKEN), "quantization_config.kv_cache_scheme: .*--kv"),
        (compressed(moe_sparsity_config={"a": 1}), "moe_sparsity_config"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse-24-bitmask'"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config.config_groups is"),
        (compressed(output_activations=TOKEN), "group_0.output_activations: rounded outputs"),
        (compressed(format="float-quantized"), "format is 'float-quantized'; Paceline reads pack-quantized"),
        (compressed(format="marlin-24"), "format is 'marlin-24'"),
        (compressed({"type": "float"}), "weights.type is 'float'; Paceline reads int"),
        (compressed({"num_bits": 1}), "weights.num_bits is 1"),
        (compressed({"num_bits": None}), "weights.num_bits is None"),
        (compressed({"strategy": "block"}), "weights.strategy is 'block'; Paceline reads group, channel, tensor"),
        (
            compressed({"strategy": "channel"}),
            "weights.group_size is 128; Paceline reads a size for the strategy group",
        ),
        (compressed({"group_size": None}), "weights.group_size is None; Paceline reads a size"),
        (compressed({"dynamic": True}), "weights.dynamic is True"),
        (compressed({"group_size": 16}), "weights.group_size is 16"),
        (
            compressed(WEIGHTS | {"actorder": "group"}, format="int-quantized"),
            "weights.actorder is 'group'; Paceline reads weight or none with int-quantized",
        ),
        (compressed(input_activations=TOKEN), r"int8 activations with weights of 4 bits \(pack-quantized, group"),
        (
            compressed(CHANNEL | {"symmetric": False}, format="int-quantized", input_activations=TOKEN),
            r"input_activations: int8 activations with weights of 8 bits \(int-quantized, channel, asymmetric\)",
        ),
        (
            compressed(CHANNEL, format="int-quantized", input_activations=TOKEN | {"dynamic": False}),
            "input_activations.dynamic is False; Paceline reads True",
        ),
        (
            compressed(CHANNEL, format="int-quantized", input_activations=TOKEN | {"strategy": "tensor"}),
            "input_activations.strategy is 'tensor'; Paceline reads token",
        ),
        (
            compressed(CHANNEL, format="int-quantized", input_activations=TOKEN | {"symmetric": False}),
            "input_activations.symmetric is False",
        ),
        (
            compressed(CHANNEL, format="int-quantized", input_activations=TOKEN | {"type": "float"}),
            "input_activations.type is 'float'",
        ),
        (
            compressed(CHANNEL, format="int-quantized", input_activations=TOKEN | {"num_bits": 4}),
            "input_activations.num_bits is 4",
        ),
    ],
)
def test_what_cannot_be_honoured_names_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        layout(values)
    assert str(caught.value).startswith("config.json: quantization_config.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (compressed(config_groups=None), "quantization_config.config_groups is None, expected an object"),
        (compressed(config_groups={"W4A16": ["Linear"]}), r"config_groups.W4A16 is \['Linear'\], expected an object"),
        (compressed(targets="Linear"), "group_0.targets is 'Linear', expected a list of strings"),
        (compressed(ignore="lm_head"), "ignore is 'lm_head', expected a list of strings"),
        (compressed(targets=["re:("]), r"'\(' is no regular expression"),
        (GPTQ_CONFIG | {"dynamic": {"(": {}}}, r"'\(' is no regular expression"),
        (GPTQ_CONFIG | {"dynamic": {".*": 8}}, r"dynamic..\* is 8, expected an object"),
        ([4], r"quantization_config is \[4\], expected an object"),
    ],
)
def test_what_cannot_be_is_named(values: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        layout(values)
