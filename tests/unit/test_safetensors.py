"""Hugging Face directories: bytes against the ``safetensors`` library, names against ``gguf``, configurations."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.safetensors import canonical_name

HIDDEN, FFN, VOCAB, LAYERS = 32, 48, 20, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model_config(class_name: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json of a tiny model; a change to ``...`` removes the key."""
    values = {
        "architectures": [class_name],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


def tensor_shapes(*, bias: bool = False, norms: bool = False) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (q, HIDDEN),
            prefix + "self_attn.k_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.v_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, q),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if bias:
            shapes |= {prefix + f"self_attn.{x}_proj.bias": (size,) for x, size in (("q", q), ("k", kv), ("v", kv))}
        if norms:
            shapes |= {prefix + f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    return shapes


def write_file(path: Path, contents: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A file of tensors (dtype, shape, bytes), by hand: the library's writer takes no bfloat16 from numpy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in contents.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in contents.values()))


def random_contents(
    shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str] | None = None
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Random bytes for those tensors, F32 unless ``dtypes`` says otherwise."""
    generator = np.random.default_rng(len(shapes))
    contents = {}
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "F32")
        contents[name] = dtype, shape, generator.bytes(int(np.prod(shape)) * ITEM_BYTES[dtype])
    return contents


def write_model(
    directory: Path,
    config: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    dtypes: dict[str, str] | None = None,
) -> None:
    (directory / "config.json").write_text(json.dumps(config or model_config()))
    write_file(directory / "model.safetensors", random_contents(shapes or tensor_shapes(), dtypes))


def test_names_equal_those_of_the_gguf_library() -> None:
    names = [*tensor_shapes(bias=True, norms=True), "model.layers.17.mlp.up_proj.weight"]
    for architecture in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.QWEN3):
        library = gguf.get_tensor_name_map(architecture, 18)
        for name in names:
            expected = library.get_name(name, try_suffixes=(".weight", ".bias"))
            assert expected is None or canonical_name(name) == expected
    assert canonical_name("model.layers.0.self_attn.q_norm.weight") == "blk.0.attn_q_norm.weight"


def test_tensors_equal_the_library(tmp_path: Path) -> None:
    shapes = tensor_shapes()
    dtypes = {name: ("F32", "F16", "BF16")[i % 3] for i, name in enumerate(shapes)}
    write_model(tmp_path, shapes=shapes, dtypes=dtypes)
    checkpoint = open_checkpoint(tmp_path)
    library = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert len(checkpoint.names()) == len(shapes) == len(library)
    for name, shape in shapes.items():
        tensor = checkpoint.tensor(canonical_name(name) or "")
        assert tensor.kind == dtypes[name] == library[name]["dtype"]
        assert tensor.shape == shape == tuple(library[name]["shape"])
        assert tensor.data.tobytes() == bytes(library[name]["data"])
        assert tensor.data.dtype == np.uint8
        assert not tensor.data.flags.owndata
        assert not tensor.data.flags.writeable
    assert checkpoint.interleaved_rope is False


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    arrays = {name: generator.standard_normal(shape, np.float32) for name, shape in tensor_shapes().items()}
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.float16)
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, array in arrays.items():
        data = checkpoint.tensor(canonical_name(name) or "").data
        np.testing.assert_array_equal(data.view(array.dtype).reshape(array.shape), array)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    write_model(whole)
    (parts / "config.json").write_text(json.dumps(model_config()))
    contents = random_contents(tensor_shapes())
    names = list(contents)
    weight_map = {}
    for number, chunk in enumerate((names[:7], names[7:])):
        file_name = f"model-0000{number + 1}-of-00002.safetensors"
        write_file(parts / file_name, {name: contents[name] for name in chunk})
        weight_map |= dict.fromkeys(chunk, file_name)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    one, two = open_checkpoint(whole), open_checkpoint(parts)
    assert set(one.names()) == set(two.names())
    assert {file.name for file in one.files} == {"config.json", "model.safetensors"}
    assert {file.name for file in two.files} == {"config.json", *weight_map.values()}
    for name in one.names():
        assert one.tensor(name).data.tobytes() == two.tensor(name).data.tobytes()
    (parts / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        open_checkpoint(parts)


def test_index_that_leaves_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside of the directory"):
        open_checkpoint(tmp_path)


def test_llama_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert open_checkpoint(tmp_path).config == ModelConfig(
        architecture="llama",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        context_length=256,
        rms_norm_eps=1e-5,
        rope=RopeConfig(5000.0, HEAD_DIM),
        tie_embeddings=False,
    )


def test_defaults_of_an_old_llama(tmp_path: Path) -> None:
    shapes = tensor_shapes()
    for name, shape in shapes.items():
        if "k_proj" in name or "v_proj" in name:
            shapes[name] = (2 * shape[0], shape[1])
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    write_model(tmp_path, model_config(**dict.fromkeys(absent, ...)), shapes)
    config = open_checkpoint(tmp_path).config
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (HEADS, HIDDEN // HEADS, 1e-6)
    assert (config.rope.theta, config.context_length) == (10000.0, 2048)


def test_tied_head_and_buffers_are_passed_over(tmp_path: Path) -> None:
    shapes = tensor_shapes() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (HEAD_DIM // 2,)}
    write_model(tmp_path, model_config(tie_word_embeddings=True), shapes)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_embeddings
    assert "output.weight" not in checkpoint.names()
    assert len(checkpoint.names()) == len(tensor_shapes()) - 1


def test_qwen_families(tmp_path: Path) -> None:
    write_model(tmp_path, model_config("Qwen2ForCausalLM"), tensor_shapes(bias=True))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.config.architecture, checkpoint.config.attention_bias) == ("qwen2", True)
    assert checkpoint.tensor("blk.1.attn_k.bias").shape == (KV_HEADS * HEAD_DIM,)
    write_model(tmp_path, model_config("Qwen3ForCausalLM"), tensor_shapes(norms=True))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.config.architecture, checkpoint.config.qk_norm) == ("qwen3", True)
    assert checkpoint.tensor("blk.0.attn_k_norm.weight").shape == (HEAD_DIM,)


@pytest.mark.parametrize(
    ("class_name", "changes", "window"),
    [
        ("LlamaForCausalLM", {"sliding_window": 16}, None),
        ("MistralForCausalLM", {"sliding_window": 16}, 16),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {}, 4096),
        ("Qwen2ForCausalLM", {"sliding_window": 16}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * LAYERS},
            16,
        ),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True}, None),
    ],
)
def test_sliding_window(tmp_path: Path, class_name: str, changes: dict[str, Any], window: int | None) -> None:
    shapes = tensor_shapes(bias=class_name.startswith("Qwen2"), norms=class_name.startswith("Qwen3"))
    write_model(tmp_path, model_config(class_name, **changes), shapes)
    assert open_checkpoint(tmp_path).config.sliding_window == window


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": None}, RopeConfig(5000.0, HEAD_DIM)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(5000.0, HEAD_DIM)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(5000.0, HEAD_DIM, RopeScaling("linear", factor=2.0)),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            RopeConfig(5000.0, HEAD_DIM, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0, HEAD_DIM)),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0} | LLAMA3},
            RopeConfig(7.0, HEAD_DIM, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        ),
    ],
)
def test_rope_in_both_styles(tmp_path: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    write_model(tmp_path, model_config(**changes))
    assert open_checkpoint(tmp_path).config.rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'; Paceline runs LlamaForCausalLM"),
        ({"architectures": ...}, "architectures names None"),
        ({"architectures": 7}, "architectures names 7"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures names ['LlamaForCausalLM']"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "alpha": 2.0}}, "rope_type 'yarn' with alpha"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0, "mrope_section": [8]}},
            "'linear' with mrope_section",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "biases in the feed-forward layers"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 1,
            },
            "layers of different attention",
        ),
    ],
)
def test_unsupported_features_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model(tmp_path, model_config(**changes))
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


def test_json_too_deep_to_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json: is not JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is None, expected a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": [["full_attention"]]}, "layer_types is [["),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": "2",
            },
            "max_window_layers is '2'",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which cannot share num_key_value_heads 3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": 5}, "rope_scaling is 5"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
    ],
)
def test_impossible_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model(tmp_path, model_config(**changes))
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)


def test_layers_that_no_file_could_hold_are_found_at_once(tmp_path: Path) -> None:
    """Not after 2^60 names of tensors."""
    for class_name in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
        for count, problem in ((2**60, "num_hidden_layers is 1152921504606846976"), (9999, "holds only 21 tensors")):
            changes = {"num_hidden_layers": count, "use_sliding_window": True, "max_window_layers": 0}
            write_model(tmp_path, model_config(class_name, **changes))
            with pytest.raises(CheckpointError, match=problem):
                open_checkpoint(tmp_path)


def test_missing_and_misshapen_and_left_over_tensors(tmp_path: Path) -> None:
    shapes = tensor_shapes()
    del shapes["model.layers.1.mlp.up_proj.weight"]
    write_model(tmp_path, shapes=shapes)
    with pytest.raises(CheckpointError, match="missing") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tensor == "blk.1.ffn_up.weight"
    write_model(tmp_path, shapes=tensor_shapes() | {"model.norm.weight": (HIDDEN + 1,)})
    with pytest.raises(CheckpointError, match=r"has shape \(33,\), expected \(32,\)") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tensor == "output_norm.weight"
    write_model(tmp_path, shapes=tensor_shapes() | {"model.layers.0.self_attn.o_proj.bias": (HIDDEN,)})
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.attn_output\.bias'"):
        open_checkpoint(tmp_path)


def test_unsupported_dtype_names_file_and_tensor(tmp_path: Path) -> None:
    write_model(tmp_path, dtypes={"model.layers.0.mlp.up_proj.weight": "F8_E4M3"})
    with pytest.raises(UnsupportedError, match=r"model\.safetensors: tensor 'blk\.0\.ffn_up\.weight' is F8_E4M3"):
        open_checkpoint(tmp_path)
