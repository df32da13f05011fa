"""What is written in each format, read back by definitions of the formats that share no code with the writers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from model_files import file_config, write_directory_model, write_gguf_model
from numpy.typing import NDArray
from rounded_models import RoundedModel, rounded
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import Experts
from paceline.errors import CheckpointError, OutputError, ParameterError, UnsupportedError
from paceline.ops.reference import inverse_frequencies
from paceline.quantize.export import safetensors_files
from paceline.quantize.export.formats import FORMATS, check_format, default_format, is_layer_matrix
from paceline.quantize.export.tensors import float_tensor, huggingface_name
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.checksums import verify_checksums
from paceline.weights.raw import Checkpoint, RawTensor

Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One source of each kind."""
    folder = tmp_path_factory.mktemp("models")
    write_gguf_model(folder / "source.gguf", file_config(), {"token_embd.weight": "Q8_0"})
    write_directory_model(folder / "source", file_config(tie_embeddings=False), "F16")
    return folder


@pytest.fixture(scope="module", params=["source.gguf", "source"])
def source(request: pytest.FixtureRequest, folder: Path) -> Checkpoint:
    return open_checkpoint(folder / request.param)


def half_split(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows 2i and 2i + 1 of each head at i and i + head / 2."""
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def expected_values(model: RoundedModel, name: str) -> NDArray[np.float32]:
    """In Hugging Face's order of rows."""
    matrix = model.matrix(name)
    values = model.values(name) if matrix is None else matrix.values()
    config = model.checkpoint.config
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[2] if "blk" in name else "")
    return half_split(values, heads) if heads and model.checkpoint.interleaved_rope else values


def nibbles(words: NDArray[np.int32]) -> NDArray[np.uint32]:
    """[R, C] words as [R, C, 8] numbers of four bits from the least significant one."""
    return (words.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)


def gptq_values(arrays: Arrays, module: str) -> NDArray[np.float32]:
    """Input k, output n: scales[g, n] (q[k, n] - z[g, n]) with g = g_idx[k]; q packed along k, z along n."""
    codes = nibbles(arrays[f"{module}.qweight"]).swapaxes(1, 2).reshape(-1, arrays[f"{module}.qweight"].shape[1])
    zeros = nibbles(arrays[f"{module}.qzeros"]).reshape(arrays[f"{module}.qzeros"].shape[0], -1)
    group = arrays[f"{module}.g_idx"]
    centred = codes.astype(np.float32) - zeros[group].astype(np.float32)
    return (arrays[f"{module}.scales"][group].astype(np.float32) * centred).T


def awq_values(arrays: Arrays, module: str, group_size: int) -> NDArray[np.float32]:
    """As GPTQ, all packed along n, the eight of a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    place = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble in which the word's output 0, 1, ... is
    codes, zeros = (
        nibbles(arrays[f"{module}.{name}"])[:, :, place].reshape(arrays[f"{module}.{name}"].shape[0], -1)
        for name in ("qweight", "qzeros")
    )
    group = np.arange(len(codes)) // group_size
    centred = codes.astype(np.float32) - zeros[group].astype(np.float32)
    return (arrays[f"{module}.scales"][group].astype(np.float32) * centred).T


def check_plain_tensors(model: RoundedModel, arrays: Arrays) -> None:
    config = model.checkpoint.config
    for name in model.checkpoint.names():
        if is_layer_matrix(name):
            continue
        expected, found = expected_values(model, name), arrays[huggingface_name(name)]
        if model.checkpoint.tensor(name).kind == "Q8_0":
            expected = expected.astype(np.float16).astype(np.float32)
        assert np.array_equal(found.astype(np.float32), expected), name
    assert ("lm_head.weight" in arrays) is not config.tie_embeddings


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("fmt", ["gptq", "awq"])
def test_gptq_and_awq_by_their_definition(source: Checkpoint, tmp_path: Path, fmt: str, symmetric: bool) -> None:
    model = RoundedModel(source, Scheme("rtn", 4, 64, symmetric))
    write_model(model, tmp_path / "m", fmt)
    arrays = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
    for name in filter(is_layer_matrix, source.names()):
        module = huggingface_name(name).removesuffix(".weight")
        values = gptq_values(arrays, module) if fmt == "gptq" else awq_values(arrays, module, 64)
        assert np.array_equal(values, expected_values(model, name)), name
    check_plain_tensors(model, arrays)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["bits"], quantization["group_size"]) == (fmt, 4, 64)
    if fmt == "gptq":
        assert (quantization["checkpoint_format"], quantization["desc_act"]) == ("gptq_v2", False)
        assert quantization["sym"] is symmetric
    else:
        assert (quantization["version"], quantization["zero_point"]) == ("gemm", True)


def test_gptq_with_an_order_of_inputs(source: Checkpoint, tmp_path: Path) -> None:
    name = "blk.1.attn_q.weight"
    order = np.random.default_rng(0).permutation(source.config.hidden_size).astype(np.int32)
    model = RoundedModel(source, Scheme("rtn", 4, 32), orders={name: order})
    write_model(model, tmp_path / "m", "gptq")
    arrays = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
    values = gptq_values(arrays, "model.layers.1.self_attn.q_proj")
    assert np.array_equal(values, expected_values(model, name))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["quantization_config"]["desc_act"] is True
    for fmt in ("gguf", "awq", "compressed-tensors"):
        with pytest.raises(ParameterError, match=f"{name} has its inputs in an order of its own .*: gptq, paceline"):
            write_model(model, tmp_path / "other", fmt)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("bits", "symmetric", "kind"), [(4, True, "Q4_0"), (4, False, "Q4_1"), (8, True, "Q8_0")])
def test_gguf_by_the_library(source: Checkpoint, tmp_path: Path, bits: int, symmetric: bool, kind: str) -> None:
    """Bit for bit, except that Q4_1 rounds the minimum -s z to f16."""
    model = RoundedModel(source, Scheme("rtn", bits, 32, symmetric))
    write_model(model, tmp_path / "m.gguf", "gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors.keys() == set(source.names())
    for name, tensor in tensors.items():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        matrix = model.matrix(name)
        if matrix is None:
            expected = expected_values(model, name)
            if name in ("token_embd.weight", "output.weight"):
                assert tensor.tensor_type.name == "Q8_0"
                quantised = gguf.quants.quantize(expected, gguf.GGMLQuantizationType.Q8_0)
                expected = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
                assert np.abs(values - expected).max() <= np.abs(expected).max() / 127
            else:
                assert np.array_equal(values, expected), name
            continue
        assert tensor.tensor_type.name == kind
        heads = {"attn_q": source.config.num_heads, "attn_k": source.config.num_kv_heads}.get(name.split(".")[2])
        found = half_split(values, heads) if heads else values
        expected = expected_values(model, name)
        if kind == "Q4_1":
            minimum = np.repeat(matrix.scale.astype(np.float32) * matrix.zero, 32, axis=1)
            assert np.abs(found - expected).max() <= np.abs(minimum).max() * 2.0**-11
            assert not np.array_equal(found, expected)  # else the bound says nothing
        else:
            assert np.array_equal(found, expected), name
    assert reader.fields["general.file_type"].contents() == {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}[kind]
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"


def test_a_gguf_source_keeps_the_bytes_of_its_embeddings(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder / "source.gguf")
    model = RoundedModel(source, Scheme("rtn", 4, 32))
    for bits, kind in ((None, "Q8_0"), (16, "F16"), (8, "Q8_0"), (4, "Q4_1")):
        for fmt in ("gguf", "paceline"):
            write_model(model, tmp_path / "m", fmt, head_bits=bits, force=True)
            found = open_checkpoint(tmp_path / "m").tensor("token_embd.weight")
            assert found.kind == kind
            expected = dequantize(source.tensor("token_embd.weight"))
            if bits is None:
                assert np.array_equal(found.data, source.tensor("token_embd.weight").data)
            step = {None: 0, 16: 2.0**-10, 8: 2 / 254, 4: 2 / 15}[bits]
            assert np.abs(dequantize(found) - expected).max() <= step * np.abs(expected).max()


class OneOther:
    """A checkpoint with another tensor in the place of one."""

    def __init__(self, source: Checkpoint, other: RawTensor) -> None:
        self._source, self._other = source, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str) -> RawTensor:
        return self._other if name == self._other.name else self._source.tensor(name)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_head_in_blocks_that_gguf_lacks_becomes_q8_0(folder: Path, tmp_path: Path, symmetric: bool) -> None:
    """One as GPTQ's files can have it."""
    source = open_checkpoint(folder / "source")
    values, order = dequantize(source.tensor("output.weight")), np.random.default_rng(0).permutation(128)
    matrix = rounded(values[:, order], Scheme("rtn", 4, 32, symmetric), order=order.astype(np.int32))
    head = matrix.blocks("output.weight")
    assert head.kind == ("Q4_0" if symmetric else "Q4G32Z")
    model = RoundedModel(OneOther(source, head), Scheme("rtn", 4, 32))  # type: ignore[arg-type]
    write_model(model, tmp_path / "m.gguf", "gguf")
    found = open_checkpoint(tmp_path / "m.gguf").tensor("output.weight")
    assert found.kind == "Q8_0"
    # The columns are in the layer's order again: all others would be off by as much as the weights.
    np.testing.assert_allclose(dequantize(found), dequantize(head), atol=np.abs(values).max() / 200)


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq", "awq"])
def test_modules_that_are_left_alone_are_named(source: Checkpoint, tmp_path: Path, fmt: str) -> None:
    name, module = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj"
    write_model(RoundedModel(source, Scheme("rtn", 4, 32), left_alone=(name,)), tmp_path / "m", fmt)
    found = open_checkpoint(tmp_path / "m").tensor(name)
    np.testing.assert_array_equal(dequantize(found), dequantize(source.tensor(name)))
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    if fmt == "gptq":
        (rule,) = config["dynamic"]
        assert rule.startswith("-:")  # how GPTQModel writes that it is left out
        assert re.match(rule[2:], module)
        assert not re.match(rule[2:], module.replace("1", "11"))
    elif fmt == "awq":
        assert config["modules_to_not_convert"] == [module]
    else:
        assert config["ignore"] == ["lm_head", module]


def test_zero_points_that_are_announced_are_there_even_if_all_are_the_middle(folder: Path, tmp_path: Path) -> None:
    source, name = open_checkpoint(folder / "source"), "blk.0.attn_q.weight"
    values = np.random.default_rng(0).integers(-8, 8, source.tensor(name).shape).astype(np.float32)
    values[:, ::32], values[:, 1::32] = -8, 7
    raw = RawTensor(name, values.shape, "F32", values.reshape(-1).view(np.uint8))
    model = RoundedModel(OneOther(source, raw), Scheme("rtn", 4, 32))  # type: ignore[arg-type]
    assert (model.matrix(name).zero == 8).all()  # type: ignore[union-attr]
    write_model(model, tmp_path / "m", "compressed-tensors")
    planes = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight_zero_point" in planes
    np.testing.assert_array_equal(dequantize(open_checkpoint(tmp_path / "m").tensor(name)), values)


def test_head_bits_are_for_the_head_and_not_for_embeddings_beside_it(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder / "source")
    assert not source.config.tie_embeddings
    for fmt, embedding in (("paceline", "F16"), ("gguf", "Q8_0")):
        write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m", fmt, head_bits=4, force=True)
        found = open_checkpoint(tmp_path / "m")
        assert (found.tensor("token_embd.weight").kind, found.tensor("output.weight").kind) == (embedding, "Q4_1")


def test_large_models_are_written_in_parts(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RoundedModel(source, Scheme("rtn", 4, 64))
    write_model(model, tmp_path / "whole", "gptq")
    monkeypatch.setattr(safetensors_files, "MAX_SHARD_BYTES", 50_000)
    write_model(model, tmp_path / "parts", "gptq")
    whole = safetensors.numpy.load_file(tmp_path / "whole" / "model.safetensors")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == whole.keys()
    for file in files:
        for name, array in safetensors.numpy.load_file(tmp_path / "parts" / file).items():
            assert index["weight_map"][name] == file
            assert np.array_equal(array, whole[name])
    assert verify_checksums(tmp_path / "parts") == len(whole)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_tensor_that_a_method_changed_loses_no_bits(kind: str) -> None:
    source, name = tiny_checkpoint(tiny_config(), kind), "token_embd.weight"
    values = dequantize(source.tensor(name))
    assert source.tensor(name).kind == kind
    for factor, expected in ((1.0, kind), (0.5, kind), (1 / 3, "F32")):
        changed = values * np.float32(factor)
        found = float_tensor(RoundedModel(source, Scheme("rtn"), changed={name: changed}), name)
        assert found.kind == expected
        raw = RawTensor(name, values.shape, found.kind, np.ascontiguousarray(found.data).reshape(-1).view(np.uint8))
        np.testing.assert_array_equal(dequantize(raw), changed)


SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_scaled_rotation_survives_gguf_and_the_way_back(kind: str, tmp_path: Path) -> None:
    source = write_directory_model(tmp_path / "source", file_config())
    config = json.loads((source / "config.json").read_text()) | {"rope_scaling": SCALINGS[kind]}
    (source / "config.json").write_text(json.dumps(config))
    model = open_checkpoint(source)
    expected = model.config.rope.scaling
    assert expected is not None
    assert expected.kind == kind
    assert expected.attention_factor > 1.1
    for name, fmt in (("m.gguf", "gguf"), ("again.gguf", "gguf"), ("back", "gptq")):
        write_model(RoundedModel(model, Scheme("rtn", 4, 32)), tmp_path / name, fmt)
        model = open_checkpoint(tmp_path / name)
        found = model.config.rope.scaling
        assert found is not None
        assert found.attention_factor == pytest.approx(expected.attention_factor, rel=1e-7)
        assert replace(found, attention_factor=expected.attention_factor) == expected


def test_a_ramp_that_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    source = write_directory_model(tmp_path / "source", file_config())
    scaling = SCALINGS["yarn"] | {"truncate": False}
    config = json.loads((source / "config.json").read_text()) | {"rope_scaling": scaling}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="truncate false"):
        write_model(RoundedModel(open_checkpoint(source), Scheme("rtn", 4, 32)), tmp_path / "m.gguf", "gguf")


def test_frequencies_of_llama_3_survive_gguf_and_the_way_back(tmp_path: Path) -> None:
    source = write_directory_model(tmp_path / "source", file_config())
    config = json.loads((source / "config.json").read_text())
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config |= {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **factors}}
    (source / "config.json").write_text(json.dumps(config))
    model = open_checkpoint(source)
    expected = inverse_frequencies(model.config.rope, model.config.head_dim)
    plain = inverse_frequencies(replace(model.config.rope, scaling=None), model.config.head_dim)
    assert expected.min() < 0.2 * plain.min()
    for name, fmt in (("m.gguf", "gguf"), ("back", "gptq")):
        write_model(RoundedModel(model, Scheme("rtn", 4, 32)), tmp_path / name, fmt)
        model = open_checkpoint(tmp_path / name)
        np.testing.assert_allclose(inverse_frequencies(model.config.rope, model.config.head_dim), expected, rtol=1e-6)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"]["factor"] == 8.0


CANNOT = [
    ("onnx", Scheme("rtn"), None, "one of compressed-tensors"),
    ("awq", Scheme("rtn", 8), None, "4 bits, not 8; formats that hold it: compressed-tensors, gptq, paceline"),
    ("awq", Scheme("rtn", 4, None), None, "formats that hold it: compressed-tensors, gptq, paceline"),
    ("gguf", Scheme("rtn", 4, 64), None, "groups of 64; formats that hold it: compressed-tensors, gptq, awq"),
    ("gguf", Scheme("rtn", 3, 32), None, "not 3; formats that hold it: compressed-tensors, gptq, paceline"),
    ("gguf", Scheme("rtn", 8, 32), None, "no zero points"),
    ("gptq", Scheme("smoothquant", 8, None, True), None, "W8A8.*hold it: compressed-tensors, paceline"),
    ("awq", Scheme("rtn"), 8, "tied embeddings of 8 bits .*hold it: paceline"),
    ("compressed-tensors", Scheme("rtn", 4, 32), 4, "hold it: gguf, paceline"),
    ("paceline", Scheme("rtn"), 5, "one of 16, 8, 4"),
]


@pytest.mark.parametrize(("fmt", "scheme", "head_bits", "message"), CANNOT)
def test_what_a_format_cannot_hold(fmt: str, scheme: Scheme, head_bits: int | None, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        check_format(file_config(), scheme, fmt, head_bits=head_bits)


def test_families_of_our_own_format_only() -> None:
    gemma = file_config(architecture="gemma3", qk_norm=True, activation="gelu_tanh")
    assert (default_format(file_config()), default_format(gemma)) == ("compressed-tensors", "paceline")
    check_format(gemma, Scheme("rtn"), "paceline")
    with pytest.raises(ParameterError, match="for llama, qwen2, qwen3, not for gemma3; formats that hold it: paceline"):
        check_format(gemma, Scheme("rtn"), "gptq")


def test_widths_that_do_not_fit() -> None:
    with pytest.raises(ParameterError, match="96 inputs; possible are 32 or channel"):
        check_format(file_config(intermediate_size=96), Scheme("rtn"), "paceline")
    with pytest.raises(ParameterError, match="no whole number of words of 3-bit"):
        check_format(file_config(num_kv_heads=1, num_heads=8), Scheme("rtn", 3, 32), "gptq")
    for fmt in ("gptq", "paceline"):
        with pytest.raises(ParameterError, match="112 inputs, no multiple of 32"):
            check_format(file_config(intermediate_size=112), Scheme("rtn", 4, None), fmt)
    with pytest.raises(ParameterError, match=r"head_bits=4.*48 inputs, no multiple of 32: 16"):
        check_format(file_config(hidden_size=48), Scheme("rtn", 4, None), "paceline", head_bits=4)
    check_format(file_config(), Scheme("rtn", 3, 32), "gptq")


@pytest.mark.parametrize("fmt", FORMATS)
def test_mixtures_of_experts_are_not_quantised(fmt: str) -> None:
    with pytest.raises(UnsupportedError, match="mixtral: a mixture of experts"):
        check_format(file_config(architecture="mixtral", experts=Experts(4, 2, 64)), Scheme("rtn"), fmt)


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq", "awq", "gguf", "paceline"])
def test_values_that_are_not_finite_are_refused(source: Checkpoint, tmp_path: Path, fmt: str) -> None:
    for name in ("output_norm.weight", "token_embd.weight"):
        values = dequantize(source.tensor(name)).copy()
        values.flat[3] = np.inf
        model = RoundedModel(source, Scheme("rtn", 4, 32), changed={name: values})
        with pytest.raises(CheckpointError, match=f"{name}.*infinite"):
            write_model(model, tmp_path / "m", fmt)
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced_unasked(source: Checkpoint, tmp_path: Path) -> None:
    model = RoundedModel(source, Scheme("rtn", 4, 32))
    write_model(model, tmp_path / "m", "gguf")
    before = (tmp_path / "m").read_bytes()
    with pytest.raises(OutputError, match="--force"):
        write_model(model, tmp_path / "m", "gguf")
    with pytest.raises(OutputError, match="would be lost"):
        write_model(model, Path(source.path), "gguf", force=True)
    assert (tmp_path / "m").read_bytes() == before


def test_the_same_bytes_twice(source: Checkpoint, tmp_path: Path) -> None:
    model = RoundedModel(source, Scheme("rtn", 4, 32))
    for fmt in ("gguf", "paceline", "compressed-tensors"):
        write_model(model, tmp_path / "a" / "m", fmt, force=True)
        write_model(model, tmp_path / "b" / "m", fmt, force=True)
        files = [p for p in sorted((tmp_path / "a").rglob("*")) if p.is_file()]
        assert files
        for file in files:
            assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()
