"""Directories in Paceline's own format: what is read is what was written, and damage is named."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from model_files import file_config, write_directory_model, write_gguf_model
from rounded_models import RoundedModel

from paceline.config import RopeConfig, RopeScaling
from paceline.errors import CheckpointError, PacelineError, UnsupportedError
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.text.chat import load_chat_template
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.paceline_checkpoint import PacelineCheckpoint, config_of, config_values
from paceline.weights.raw import Checkpoint

SCHEMES = [
    Scheme("rtn", bits, group, symmetric)
    for bits in (8, 4, 3)
    for group in (32, 64, 128, None)
    for symmetric in (False, True)
] + [Scheme("smoothquant", 8, None, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_gguf_model(folder / "source.gguf", file_config(), {"token_embd.weight": "Q8_0"})
    write_directory_model(folder / "source", file_config(architecture="qwen3", qk_norm=True), "F16")
    return folder


@pytest.fixture(scope="module", params=["source.gguf", "source"])
def source(request: pytest.FixtureRequest, folder: Path) -> Checkpoint:
    return open_checkpoint(folder / request.param)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_read_is_what_was_written(source: Checkpoint, tmp_path: Path, scheme: Scheme) -> None:
    order = np.random.default_rng(1).permutation(source.config.hidden_size).astype(np.int32)
    model = RoundedModel(source, scheme, orders={"blk.0.attn_q.weight": order})
    write_model(model, tmp_path / "m", "paceline")
    found = open_checkpoint(tmp_path / "m")
    assert isinstance(found, PacelineCheckpoint)
    assert (found.config, found.interleaved_rope) == (source.config, source.interleaved_rope)
    assert set(found.names()) == set(source.names())
    for name in source.names():
        raw, matrix = found.tensor(name), model.matrix(name)
        assert found.header(name).kind == raw.kind
        if matrix is None:
            assert np.array_equal(dequantize(raw), model.values(name))
            continue
        blocks = matrix.blocks(name)
        assert (raw.kind, raw.shape) == (blocks.kind, blocks.shape)
        assert np.array_equal(raw.data, blocks.data)
        assert np.array_equal(raw.order, order) if name == "blk.0.attn_q.weight" else raw.order is None
    text = "It's 12345 o'clock\n\n  안녕 <|im_end|>"
    assert load_tokenizer(found).encode(text) == load_tokenizer(source).encode(text)
    assert load_tokenizer(found).eos_token_ids == load_tokenizer(source).eos_token_ids
    template, expected = load_chat_template(found), load_chat_template(source)
    assert template is not None
    assert expected is not None
    assert template.source == expected.source


def test_what_it_holds_can_be_quantised_again(source: Checkpoint, tmp_path: Path) -> None:
    write_model(RoundedModel(source, Scheme("rtn", 8, 32, True)), tmp_path / "eight", "paceline", head_bits=8)
    eight = open_checkpoint(tmp_path / "eight")
    for fmt in ("paceline", "compressed-tensors", "gguf"):
        model = RoundedModel(eight, Scheme("rtn", 4, 32, True))
        write_model(model, tmp_path / "four", fmt, force=True)
        found = open_checkpoint(tmp_path / "four")
        assert found.config.architecture == source.config.architecture
        norm = found.tensor("blk.1.ffn_norm.weight")
        assert np.array_equal(dequantize(norm), dequantize(source.tensor("blk.1.ffn_norm.weight")))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": RopeConfig(500000.0, 16, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))},
        {"rope": RopeConfig(10000.0, 8, RopeScaling("factors", factors=(1.0, 2.5, 3.0, 8.0)))},
        {"rope": RopeConfig(1e6, 16, RopeScaling("linear", 4.0)), "sliding_window": 100, "attention_bias": True},
        {"rms_norm_eps": float(np.float32(1e-6)), "architecture": "qwen3", "qk_norm": True},
    ],
)
def test_every_configuration_comes_back(changes: dict[str, Any]) -> None:
    config = replace(file_config(), **changes)
    values = json.loads(json.dumps(config_values(config, interleaved_rope=True)))["quantization_config"]
    assert config_of(Path("config.json"), values["model"]) == config


LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "small"}, "could not convert"),
        ({"draft_vocab_size": 3}, "draft_vocab_size is 3"),
        ({"input_norms": True}, "input_norms is True"),
        *(
            ({"rope": RopeConfig(theta, dim, scaling)}, name)
            for theta, dim, scaling, name in [
                (-1.0, 16, None, "rope.theta is -1"),
                (1e4, -2, None, "rope.dim is -2"),
                (1e4, 7, None, "rope.dim is 7"),
                (1e4, 64, None, "rope.dim is 64"),
                (1e4, 16, replace(LLAMA3, kind="dynamic"), "rope.scaling.kind is 'dynamic'"),
                (1e4, 16, replace(LLAMA3, factor=0.0), "rope.scaling.factor is 0"),
                (1e4, 16, replace(LLAMA3, factor="x"), "could not convert"),
                (1e4, 16, replace(LLAMA3, low_freq_factor=4.0), "rope.scaling.high_freq_factor is 4"),
                (1e4, 16, replace(LLAMA3, original_context=None), "damaged"),
                (1e4, 16, replace(LLAMA3, factors=(1.0,)), "rope.scaling.factors"),
                (1e4, 16, RopeScaling("factors", factors=(1.0,) * 7), "rope.scaling.factors"),
                (1e4, 16, RopeScaling("factors", factors=(1.0,) * 7 + (0.0,)), "rope.scaling.factors"),
            ]
        ),
    ],
)
def test_values_that_no_model_has_are_named(changes: dict[str, Any], name: str) -> None:
    config = replace(file_config(), **changes)
    values = json.loads(json.dumps(config_values(config, interleaved_rope=True)))["quantization_config"]
    with pytest.raises(CheckpointError, match=re.escape(name)):
        config_of(Path("config.json"), values["model"])


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((directory / "config.json").read_text())
    change(values["quantization_config"])
    (directory / "config.json").write_text(json.dumps(values))


def edit_tensors(directory: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """``change`` gets the arrays and the blocks."""
    path = directory / "model.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        metadata = dict(file.metadata())
    arrays, blocks = safetensors.numpy.load_file(path), json.loads(metadata["paceline.blocks"])
    change(arrays, blocks)
    safetensors.numpy.save_file(arrays, path, metadata | {"paceline.blocks": json.dumps(blocks)})


def edit_metadata(directory: Path, changes: dict[str, str]) -> None:
    path = directory / "model.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        metadata = dict(file.metadata())
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, metadata | changes)


def put_twice(directory: Path) -> None:
    """All tensors, in two parts."""
    whole = directory / "model.safetensors"
    shutil.copy(whole, directory / "a.safetensors")
    whole.rename(directory / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


Q = "blk.0.attn_q.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], type[PacelineError], str]] = {
    "version": (
        lambda path: edit_config(path, lambda values: values.update(version=2)),
        UnsupportedError,
        "version 2 of Paceline's format",
    ),
    "model": (
        lambda path: edit_config(path, lambda values: values.pop("model")),
        CheckpointError,
        "expected an object",
    ),
    "count": (
        lambda path: edit_config(path, lambda values: values["model"].update(num_layers="2")),
        CheckpointError,
        "num_layers is '2', expected a positive integer",
    ),
    "flag": (
        lambda path: edit_config(path, lambda values: values["model"].update(tie_embeddings=1)),
        CheckpointError,
        "tie_embeddings is 1",
    ),
    "field": (
        lambda path: edit_config(path, lambda values: values["model"].update(moe=3)),
        UnsupportedError,
        "has moe: update",
    ),
    "rope order": (
        lambda path: edit_config(path, lambda values: values.pop("interleaved_rope")),
        CheckpointError,
        "interleaved_rope is None",
    ),
    "architecture": (
        lambda path: edit_config(path, lambda values: values["model"].update(architecture="bloom")),
        UnsupportedError,
        "'bloom'",
    ),
    "rope": (
        lambda path: edit_config(path, lambda values: values["model"]["rope"].pop("theta")),
        CheckpointError,
        "damaged: 'theta'",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        CheckpointError,
        r"model\.safetensors: cannot be read",
    ),
    "truncated": (
        lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1]),
        CheckpointError,
        "truncated",
    ),
    "missing tensor": (
        lambda path: edit_tensors(path, lambda arrays, blocks: arrays.pop(Q)),
        CheckpointError,
        f"{Q}.*missing",
    ),
    "kind": (
        lambda path: edit_tensors(path, lambda arrays, blocks: blocks[Q].update(kind="Q9")),
        UnsupportedError,
        f"{Q}.*'Q9'",
    ),
    "shape": (
        lambda path: edit_tensors(path, lambda arrays, blocks: blocks[Q].update(shape=[128, 64])),
        CheckpointError,
        f"{Q}.*128, 64",
    ),
    "no blocks": (
        lambda path: edit_tensors(path, lambda arrays, blocks: blocks.pop(Q)),
        CheckpointError,
        f"{Q}.*U8 and not among",
    ),
    "order": (
        lambda path: edit_tensors(path, lambda arrays, blocks: arrays[f"{Q}.order"].fill(3)),
        CheckpointError,
        "no order of the inputs",
    ),
    "bytes of another type": (
        lambda path: edit_tensors(path, lambda arrays, blocks: arrays.update({Q: arrays[Q].astype(np.float32)})),
        CheckpointError,
        r"is Q4G32Z \(128, 128\) but has F32",
    ),
    "order of another type": (
        lambda path: edit_tensors(
            path, lambda arrays, blocks: arrays.update({f"{Q}.order": arrays[f"{Q}.order"].astype(np.float32)})
        ),
        CheckpointError,
        "is F32 .*no order of the inputs",
    ),
    "order of odd bytes": (
        lambda path: edit_tensors(path, lambda arrays, blocks: arrays.update({f"{Q}.order": np.zeros(513, np.int8)})),
        CheckpointError,
        "is I8 .*no order of the inputs",
    ),
    "order of nothing": (
        lambda path: edit_tensors(
            path, lambda arrays, blocks: arrays.update({"blk.9.attn_q.weight.order": np.zeros(128, np.int32)})
        ),
        CheckpointError,
        "not there",
    ),
    "blocks too deep to read": (
        lambda path: edit_metadata(path, {"paceline.blocks": "[" * 100_000}),
        CheckpointError,
        "paceline.blocks is missing or damaged",
    ),
    "header too deep to read": (
        lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000),
        CheckpointError,
        "the header is corrupt",
    ),
    "a tensor in two parts": (
        lambda path: put_twice(path),
        CheckpointError,
        "occurs in a.safetensors too",
    ),
}


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = open_checkpoint(folder / "source.gguf")
    order = np.arange(source.config.hidden_size, dtype=np.int32)[::-1].copy()
    path = tmp_path_factory.mktemp("written") / "m"
    write_model(RoundedModel(source, Scheme("rtn", 4, 32), orders={Q: order}), path, "paceline")
    return path


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(written: Path, tmp_path: Path, what: str) -> None:
    damage, error, message = DAMAGE[what]
    shutil.copytree(written, tmp_path / "m")
    open_checkpoint(tmp_path / "m").tensor(Q)
    damage(tmp_path / "m")
    with pytest.raises(error, match=message) as raised:
        open_checkpoint(tmp_path / "m").tensor(Q)
    assert re.search(r"m/(config\.json|[a-z]+\.safetensors)|/m:", str(raised.value))


def test_an_output_has_one_scale(folder: Path, tmp_path: Path) -> None:
    """Of the kind that repeats it in each of its blocks, which are then read by different readers."""
    model = RoundedModel(open_checkpoint(folder / "source.gguf"), Scheme("smoothquant", 8, None, True))
    write_model(model, tmp_path / "m", "paceline")
    open_checkpoint(tmp_path / "m").tensor(Q)

    def damage(arrays: dict[str, Any], blocks: dict[str, Any]) -> None:
        arrays[Q] = arrays[Q].copy()
        arrays[Q][5, 36] ^= 1

    edit_tensors(tmp_path / "m", damage)
    with pytest.raises(CheckpointError, match=r"attn_q\.weight.*several scales"):
        open_checkpoint(tmp_path / "m").tensor(Q)


def test_a_file_need_not_be_aligned(written: Path, tmp_path: Path) -> None:
    """The order of inputs crosses to native code, which reads whole integers."""
    shutil.copytree(written, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")] + b" "
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + len(header) - 1 :])
    found, expected = (open_checkpoint(each).tensor(Q) for each in (tmp_path / "m", written))
    assert found.order is not None
    assert found.order.flags.aligned
    assert np.array_equal(found.order, expected.order)
    assert np.array_equal(found.data, expected.data)


FAMILY_CONFIG = file_config(
    activation="gelu_tanh",
    sliding_window=8,
    windowed_layers=(True, False),
    local_rope=RopeConfig(500.0, 16, RopeScaling("linear", factor=2.0)),
    rope=RopeConfig(
        10000.0, 16, RopeScaling("longrope", factors=(1.0,) * 8, long_factors=(4.0,) * 8, attention_factor=1.19)
    ),
    unrotated_layers=(1,),
    embedding_scale=8.0,
    residual_scale=0.22,
    logit_scale=0.125,
    attention_scale=0.1,
    attention_softcap=50.0,
    logit_softcap=30.0,
    output_bias=True,
)


def as_json(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(config_values(config, interleaved_rope=True)))["quantization_config"]["model"]


def test_what_only_some_families_have_is_kept() -> None:
    assert config_of(Path("config.json"), as_json(FAMILY_CONFIG)) == FAMILY_CONFIG
    plain = as_json(file_config())
    assert "activation" not in plain
    assert "experts" not in plain


def scaling_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(RopeScaling("linear")), "kind": kind, **changes}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation", "relu"),
        ("windowed_layers", [True]),
        ("windowed_layers", [1, 0]),
        ("unrotated_layers", [2]),
        ("unrotated_layers", 1),
        ("local_rope", {"theta": 1.0}),
        ("local_rope.dim", {"theta": 500.0, "dim": 8, "scaling": None}),
        ("local_rope.theta", {"theta": 0.0, "dim": 16, "scaling": None}),
        ("local_rope.scaling.factors", {"theta": 5.0, "dim": 16, "scaling": scaling_of("factors", factors=[1.0])}),
        ("local_rope.scaling.kind", {"theta": 5.0, "dim": 16, "scaling": scaling_of("dynamic")}),
        ("rope.scaling.long_factors", {"theta": 5.0, "dim": 16, "scaling": scaling_of("longrope", factors=[1.0] * 8)}),
        ("rope.scaling.truncate", {"theta": 5.0, "dim": 16, "scaling": scaling_of("yarn", truncate=1)}),
        ("rope.theta", {"theta": 1.0, "dim": 16, "scaling": scaling_of("yarn")}),
        ("embedding_scale", 0.0),
        ("logit_softcap", "30"),
        ("attention_softcap", float("inf")),
        ("output_bias", 1),
        ("experts", {"num_experts": 4, "num_chosen": 2, "width": 32}),
    ],
)
def test_what_no_family_has_is_named(field: str, value: Any) -> None:
    with pytest.raises(PacelineError, match=field):
        config_of(Path("config.json"), {**as_json(FAMILY_CONFIG), field.split(".")[0]: value})
