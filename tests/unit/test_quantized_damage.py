"""Damaged directories of quantised models: whatever is wrong, opening or building says so and never fails otherwise."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_directories import random_matrices, tensors_of, write

from paceline.errors import CheckpointError, ModelError
from paceline.weights import compressed_tensors, gptq
from paceline.weights.checkpoint import open_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "desc_act": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (GPTQ, gptq.pack),
    "compressed-tensors": (COMPRESSED, compressed_tensors.pack),
}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.just([]), st.just({}), st.just([7])
)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=list(CASES))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which nothing is wrong."""
    quantization, pack = CASES[request.param]
    directory = tmp_path_factory.mktemp("whole")
    write(directory, tensors_of(random_matrices(shuffled=True), pack), quantization)
    read_all(directory)
    return directory


def read_all(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    for name in checkpoint.names():
        checkpoint.header(name)
        checkpoint.tensor(name)


def read_or_say_why(directory: Path) -> None:
    """Only an error that names the directory may come."""
    problem = str(directory)
    try:
        read_all(directory)
    except ModelError as error:
        problem = str(error)
    assert str(directory) in problem


def copy(whole: Path, directory: Path) -> tuple[bytes, dict[str, Any]]:
    """The file of tensors and the configuration, the latter written to ``directory``."""
    (directory / "config.json").write_bytes((whole / "config.json").read_bytes())
    return (whole / "model.safetensors").read_bytes(), json.loads((whole / "config.json").read_text())


@SETTINGS
@given(st.data())
def test_a_header_of_other_values(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content, _ = copy(whole, tmp_path)
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    sizes = st.lists(st.one_of(st.integers(0, 200), st.sampled_from([2**31, 2**63, 2**70])), max_size=70)
    types = st.sampled_from(["I8", "U8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3"])
    header[name][field] = data.draw(st.one_of(ANYTHING, sizes, types))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + header_bytes :])
    read_or_say_why(tmp_path)


@SETTINGS
@given(st.data())
def test_other_bytes(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Codes may be anything; an order of inputs, a shape or a scale may not."""
    content, _ = copy(whole, tmp_path)
    damaged = bytearray(content)
    at = data.draw(st.integers(0, len(content) - 1))
    damaged[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))[: len(content) - at]
    (tmp_path / "model.safetensors").write_bytes(damaged)
    read_or_say_why(tmp_path)


@SETTINGS
@given(st.data())
def test_a_configuration_of_other_values(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content, config = copy(whole, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    place = config["quantization_config"]
    if data.draw(st.booleans()) and "config_groups" in place:
        place = place["config_groups"]["group_0"]
        place = place["weights"] if data.draw(st.booleans()) else place
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ANYTHING)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_or_say_why(tmp_path)


def test_every_truncation_is_reported(whole: Path, tmp_path: Path) -> None:
    content, _ = copy(whole, tmp_path)
    for length in range(0, len(content), 1009):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [[0, 2**70], [2**63, 0], [2**40, 2**40, 0], [0] * 70])
def test_empty_tensors_of_any_shape_are_damage(whole: Path, tmp_path: Path, shape: list[int]) -> None:
    """They have the bytes of their shape."""
    content, _ = copy(whole, tmp_path)
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    name = next(name for name, entry in header.items() if entry["dtype"] == "I32")
    header[name] |= {"shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + header_bytes :])
    with pytest.raises(CheckpointError, match="corrupt"):
        open_checkpoint(tmp_path)
