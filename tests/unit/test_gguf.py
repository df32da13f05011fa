"""GGUF files against the ``gguf`` library's own writer and reader, and as configurations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.errors import CheckpointError, ModelError, UnsupportedError
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import KINDS, GGUFCheckpoint, read_header
from paceline.weights.mapped_file import map_file
from paceline.weights.raw import BLOCK_KINDS

HIDDEN, FFN, VOCAB, LAYERS = 64, 96, 40, 2
HEAD_DIM, HEADS, KV_HEADS = 16, 4, 2


def tensor_shapes(*, tied: bool = True, bias: bool = False, norms: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tiny model, written out independently of the package."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(LAYERS):
        for name, shape in [
            ("attn_norm", (HIDDEN,)),
            ("attn_q", (q, HIDDEN)),
            ("attn_k", (kv, HIDDEN)),
            ("attn_v", (kv, HIDDEN)),
            ("attn_output", (HIDDEN, q)),
            ("ffn_norm", (HIDDEN,)),
            ("ffn_gate", (FFN, HIDDEN)),
            ("ffn_up", (FFN, HIDDEN)),
            ("ffn_down", (HIDDEN, FFN)),
        ]:
            shapes[f"blk.{i}.{name}.weight"] = shape
        if bias:
            shapes |= {f"blk.{i}.attn_q.bias": (q,), f"blk.{i}.attn_k.bias": (kv,), f"blk.{i}.attn_v.bias": (kv,)}
        if norms:
            shapes |= {f"blk.{i}.attn_{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    return shapes


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    shapes: dict[str, tuple[int, ...]] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A tiny model by the library's writer. ``extra`` adds or replaces keys of the architecture; ``drop`` omits."""
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    } | (extra or {})
    for key, value in keys.items():
        if key in drop:
            continue
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    generator = np.random.default_rng(0)
    for name, shape in (shapes or tensor_shapes()).items():
        if name not in drop:
            writer.add_tensor(name, generator.standard_normal(shape, np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equals_library(path: Path) -> None:
    """Every metadata value and every tensor of our parser equals what the library reads."""
    reader = gguf.GGUFReader(path)
    header = read_header(path, map_file(path))
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, field in fields.items():
        value = header.metadata[key]
        expected = field.contents()
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, np.array(expected, value.dtype))
        else:
            assert value == expected, key
            assert type(value) is type(expected), key
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist())[::-1]
        assert info.kind == tensor.tensor_type.name
        assert info.start == tensor.data_offset
        assert info.num_bytes == tensor.n_bytes


def test_every_value_type_equals_the_library(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "밥 🍚\n")
    writer.add_array("strings", ["", "a", "é" * 300, "끝"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("flags", [True, False])
    writer.add_array("bytes", b"\x00\xff")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert_equals_library(path)
    nested = read_header(path, map_file(path)).metadata
    assert nested["text"] == "밥 🍚\n"
    assert nested["u64"] == 2**64 - 1


def test_nested_arrays_are_lists(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("pairs", [[1, 2], [3, 4]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    pairs = read_header(path, map_file(path)).metadata["pairs"]
    assert [pair.tolist() for pair in pairs] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_tensor_kind_equals_the_library(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.gguf"
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    assert BLOCK_KINDS[kind] == (block, block_bytes)
    assert KINDS[number.value] == kind
    writer = gguf.GGUFWriter(path, "llama")
    data = np.random.default_rng(1).integers(0, 256, (3, 2 * block_bytes), dtype=np.uint8)
    writer.add_tensor("odd", np.arange(5, dtype=np.float32))  # 20 bytes: the next tensor starts after padding
    writer.add_tensor("t", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_equals_library(path)
    buffer = map_file(path)
    info = read_header(path, buffer).tensors["t"]
    assert info.shape == (3, 2 * block)
    assert buffer[info.start : info.start + info.num_bytes] == data.tobytes()


def test_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("a", np.ones(3, np.float32))
    writer.add_tensor("b", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_equals_library(path)


def test_llama_config_and_tensors(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == ModelConfig(
        architecture="llama",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        context_length=128,
        rms_norm_eps=float(np.float32(1e-5)),
        rope=RopeConfig(5000.0, HEAD_DIM),
        tie_embeddings=True,
    )
    assert checkpoint.interleaved_rope is True
    assert checkpoint.path == str(path)
    assert checkpoint.files == (path,)
    assert set(checkpoint.names()) == set(tensor_shapes())
    generator = np.random.default_rng(0)
    for name, shape in tensor_shapes().items():
        tensor = checkpoint.tensor(name)
        assert (tensor.name, tensor.shape, tensor.kind) == (name, shape, "F32")
        np.testing.assert_array_equal(
            tensor.data.view("<f4").reshape(shape), generator.standard_normal(shape, np.float32)
        )
        assert tensor.data.dtype == np.uint8
        assert not tensor.data.flags.owndata
        assert not tensor.data.flags.writeable


def test_data_outlives_the_checkpoint(tmp_path: Path) -> None:
    data = open_checkpoint(write_model(tmp_path / "tiny.gguf")).tensor("output_norm.weight").data
    assert np.isfinite(data.view("<f4")).all()


def test_untied_head_and_file_without_suffix(tmp_path: Path) -> None:
    path = write_model(tmp_path / "no-suffix", shapes=tensor_shapes(tied=False))
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert not checkpoint.config.tie_embeddings
    assert checkpoint.tensor("output.weight").shape == (VOCAB, HIDDEN)


def test_qwen2_has_biases_and_pairs_far_apart(tmp_path: Path) -> None:
    path = write_model(tmp_path / "q.gguf", architecture="qwen2", shapes=tensor_shapes(bias=True))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.architecture == "qwen2"
    assert checkpoint.config.attention_bias
    assert not checkpoint.config.qk_norm
    assert checkpoint.interleaved_rope is False


def test_qwen3_takes_its_head_length_from_the_file(tmp_path: Path) -> None:
    head_dim = 2 * HEAD_DIM  # twice hidden / heads
    shapes = tensor_shapes(norms=True)
    for name, shape in shapes.items():
        if "attn_output" in name:
            shapes[name] = (HIDDEN, 2 * shape[1])
        elif "attn_" in name and "attn_norm" not in name:
            shapes[name] = (2 * shape[0], *shape[1:])
    extra = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    checkpoint = open_checkpoint(write_model(tmp_path / "q.gguf", architecture="qwen3", shapes=shapes, extra=extra))
    assert checkpoint.config.qk_norm
    assert checkpoint.config.head_dim == head_dim
    assert checkpoint.config.rope.dim == head_dim
    assert checkpoint.interleaved_rope is False


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling("linear", factor=4.0)),
        ({"rope.scale_linear": 2.0}, RopeScaling("linear", factor=2.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        (YARN, RopeScaling("yarn", factor=4.0, original_context=32, attention_factor=1 + 0.1 * math.log(4))),
        (
            {**YARN, "rope.scaling.yarn_attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 16.0},
            RopeScaling("yarn", factor=4.0, original_context=32, beta_fast=16.0, attention_factor=1.5),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, extra: dict[str, Any], scaling: RopeScaling | None) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "r.gguf", extra=extra))
    assert checkpoint.config.rope.scaling == scaling


def test_rope_factors_are_configuration_and_not_a_tensor(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0], np.float32)
    checkpoint = open_checkpoint(write_model(tmp_path / "r.gguf", tensors={"rope_freqs.weight": factors}))
    assert checkpoint.config.rope.scaling == RopeScaling("factors", factors=tuple(factors.tolist()))
    assert "rope_freqs.weight" not in checkpoint.names()


def test_sliding_window(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "w.gguf", extra={"attention.sliding_window": 32}))
    assert checkpoint.config.sliding_window == 32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"drop": ("block_count",)}, CheckpointError, "llama.block_count"),
        ({"extra": {"block_count": 0}}, CheckpointError, "llama.block_count is 0"),
        ({"extra": {"block_count": 4_000_000_000}}, CheckpointError, "llama.block_count is 4000000000"),
        ({"extra": {"block_count": 9999}}, CheckpointError, "9999 layers but holds only"),
        ({"extra": {"embedding_length": "wide"}}, CheckpointError, "llama.embedding_length is 'wide'"),
        (
            {"extra": {"attention.head_count": 3}},
            CheckpointError,
            "attention.head_count is 3, which cannot share",
        ),
        ({"extra": {"attention.layer_norm_rms_epsilon": -1.0}}, CheckpointError, "layer_norm_rms_epsilon is -1.0"),
        ({"extra": {"rope.dimension_count": 15}}, CheckpointError, "rope.dimension_count 15"),
        ({"drop": ("blk.1.ffn_up.weight",)}, CheckpointError, "tensor 'blk.1.ffn_up.weight': missing"),
        ({"drop": ("token_embd.weight",)}, CheckpointError, "tensor 'token_embd.weight': missing"),
        (
            {"extra": {"feed_forward_length": 128}},
            CheckpointError,
            "tensor 'blk.0.ffn_gate.weight': has shape (96, 64)",
        ),
        ({"tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, CheckpointError, "'rope_freqs.weight'"),
        ({"extra": {"rope.scaling.type": "ntk"}}, UnsupportedError, "rope.scaling.type 'ntk'"),
        ({"extra": {"rope.scaling.type": "longrope"}}, CheckpointError, "'rope_factors_short.weight'"),
        ({"extra": {"rope.scaling.attn_factor": 1.5}}, UnsupportedError, "attn_factor without scaling"),
        ({"extra": {**YARN, "rope.scaling.attn_factor": 1.5}}, UnsupportedError, "attn_factor is 1.5"),
        ({"extra": {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}}, UnsupportedError, "yarn_log_multiplier"),
        ({"extra": {**YARN, "rope.scaling.yarn_beta_slow": 40.0}}, CheckpointError, "yarn_beta_slow 40"),
        ({"extra": {**YARN, "rope.freq_base": 1.0}}, CheckpointError, "rope.freq_base is 1"),
        ({"extra": YARN, "tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, UnsupportedError, "together with"),
        ({"tensors": {"rope_factors_long.weight": np.ones(8, np.float32)}}, UnsupportedError, "with its pair"),
        ({"tensors": {"rope_factors_long.weight": np.ones(7, np.float32)}}, CheckpointError, "expected 8 positive"),
        ({"extra": {"expert_count": 8}}, CheckpointError, "expert_used_count"),
        ({"extra": {"feed_forward_length": [96, 64]}}, UnsupportedError, "differs from layer to layer"),
        (
            {"tensors": {"blk.0.attn_output.bias": np.zeros(64, np.float32)}},
            UnsupportedError,
            "'blk.0.attn_output.bias'",
        ),
        ({"architecture": "mamba"}, UnsupportedError, "'mamba'; Paceline runs llama, qwen2, qwen3"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    tmp_path: Path, change: dict[str, Any], error: type[ModelError], message: str
) -> None:
    path = write_model(tmp_path / "bad.gguf", **change)
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q2.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"q2\.gguf: tensor 'blk\.0\.ffn_up\.weight' is of type Q2_K; .*Q6_K"):
        open_checkpoint(path)
