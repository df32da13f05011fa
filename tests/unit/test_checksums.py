"""Every byte of what Paceline writes is guarded: one that is flipped is found, wherever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from model_files import file_config, write_directory_model, write_gguf_model
from rounded_models import RoundedModel

from paceline.errors import CheckpointError, PacelineError
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.checksums import KEY, verify_checksums
from paceline.weights.gguf import read_header
from paceline.weights.mapped_file import map_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    source = open_checkpoint(write_gguf_model(folder / "source.gguf", file_config(num_layers=1)))
    model = RoundedModel(source, Scheme("rtn", 4, 32))
    write_model(model, folder / "m.gguf", "gguf")
    write_model(model, folder / "compressed", "compressed-tensors")
    write_model(model, folder / "own", "paceline")
    return folder


def is_found(path: Path) -> bool:
    """Whether a check finds damage, by an error that a user can read."""
    try:
        return verify_checksums(path) is None
    except PacelineError:
        return True


@pytest.mark.parametrize("name", ["m.gguf", "compressed", "own"])
def test_what_is_whole_passes(folder: Path, name: str) -> None:
    num_tensors = verify_checksums(folder / name)
    assert num_tensors is not None
    assert num_tensors >= len(open_checkpoint(folder / name).names())


@pytest.mark.parametrize("name", ["m.gguf", "compressed", "own"])
def test_flipped_bits_are_found(folder: Path, tmp_path: Path, name: str) -> None:
    """At random places of each file, half of them in its first tenth, where headers are. Only padding does not count:
    zeros between a GGUF file's tensors, spaces after a safetensors header.
    """
    rng = np.random.default_rng(0)
    shutil.copytree(folder, tmp_path / "copy")
    target = tmp_path / "copy" / name
    for file in [target] if target.is_file() else sorted(target.iterdir()):
        whole = file.read_bytes()
        places = np.concatenate([rng.integers(0, len(whole), 30), rng.integers(0, max(len(whole) // 10, 1), 30)])
        places = np.concatenate([places, np.arange(min(len(whole), 30))])
        missed = []
        for place in places.tolist():
            damaged = bytearray(whole)
            damaged[place] ^= 1 << int(rng.integers(0, 8))
            file.write_bytes(damaged)
            if not is_found(target):
                missed.append(place)
        file.write_bytes(whole)
        if name == "m.gguf":
            header = read_header(file, map_file(file))
            used = np.zeros(len(whole), bool)
            used[: min(info.start for info in header.tensors.values()) - 32] = True
            for info in header.tensors.values():
                used[info.start : info.start + info.num_bytes] = True
            missed = [place for place in missed if used[place]]
        assert not missed, (file, missed)


@pytest.mark.parametrize("name", ["m.gguf", "compressed", "own"])
def test_truncated_files_are_found(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    target = tmp_path / "copy" / name
    for file in [target] if target.is_file() else sorted(target.iterdir()):
        whole = file.read_bytes()
        for length in (0, 1, 7, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            assert is_found(target), (file, length)
        if file != target:
            file.unlink()
            assert is_found(target), file
        file.write_bytes(whole)
    assert not is_found(target)


def test_the_tensor_and_the_file_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "m.gguf"
    info = read_header(path, map_file(path)).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[info.start + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.0\.ffn_up\.weight'.*damaged"):
        verify_checksums(path)
    settings = tmp_path / "copy" / "own" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("im_end", "im_emd"))
    with pytest.raises(CheckpointError, match=r"own/tokenizer_config\.json.*changed or damaged"):
        verify_checksums(settings.parent)


def test_a_part_without_checksums_among_others_is_found(folder: Path, tmp_path: Path) -> None:
    """As one that another program wrote anew; whether it is the first or the last."""
    shutil.copytree(folder / "compressed", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "b.safetensors")
    for other in ("a.safetensors", "c.safetensors"):
        safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, tmp_path / "m" / other)
        index = {"weight_map": {"x": other, "y": "b.safetensors"}}
        (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=rf"{other}: has no checksums"):
            verify_checksums(tmp_path / "m")


def test_files_of_others_have_none(folder: Path, tmp_path: Path) -> None:
    assert verify_checksums(folder / "source.gguf") is None
    assert verify_checksums(write_directory_model(tmp_path / "m", file_config())) is None


@pytest.mark.parametrize(
    "checksums",
    [
        "[" * 100_000,
        "[1]",
        "7",
        '{"tensors": {}, "files": {"../source.gguf": 0}}',
        '{"tensors": {}, "files": {"/m": 0}}',
    ],
)
def test_checksums_that_cannot_be_are_damage(folder: Path, tmp_path: Path, checksums: str) -> None:
    """Those of files outside the directory, which are not read, too."""
    shutil.copytree(folder / "own", tmp_path / "own")
    path = tmp_path / "own" / "model.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        metadata = dict(file.metadata())
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, metadata | {KEY: checksums})
    with pytest.raises(CheckpointError, match="is not readable: damaged"):
        verify_checksums(tmp_path / "own")
