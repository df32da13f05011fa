"""The hash of a model: every byte counts, names do not, and what is remembered is never out of date."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.errors import CacheDirectoryError, CheckpointError
from paceline.weights import model_hash as module
from paceline.weights.model_hash import model_hash

LONG_AGO_NS = 10**18


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files, both old enough to be remembered."""
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    paths = [tmp_path / "a.safetensors", tmp_path / "config.json"]
    paths[0].write_bytes(bytes(3 * 2**20 + 7))
    paths[1].write_bytes(b"{}")
    return paths


def test_every_byte_counts_and_no_name_does(files: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "cache" / "models.json"
    first = model_hash(files, memo)
    assert len(first) == 32
    assert model_hash(files[::-1], memo) == first
    moved = files[0].rename(tmp_path / "renamed")
    assert model_hash([moved, files[1]], memo) == first
    seen = {first, model_hash(files[1:], memo)}
    for position in (0, 2**20, 3 * 2**20 + 6):
        data = bytearray(3 * 2**20 + 7)
        data[position] = 1
        moved.write_bytes(data)
        seen.add(model_hash([moved, files[1]], memo))
    moved.write_bytes(bytes(3 * 2**20 + 6))
    seen.add(model_hash([moved, files[1]], memo))
    assert len(seen) == 6


def test_an_unchanged_file_is_hashed_once(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = tmp_path / "models.json"
    first = model_hash(files, memo)
    before = memo.stat().st_mtime_ns
    monkeypatch.setattr(module, "CHUNK_BYTES", 0)  # now a file that is read looks empty
    assert model_hash(files, memo) == first
    assert memo.stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "config.json", "models.json"]
    memo.unlink()
    assert model_hash(files, memo) != first


def test_equal_size_and_time_do_not_hide_a_change(files: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "models.json"
    os.utime(files[1], ns=(LONG_AGO_NS, LONG_AGO_NS))
    first = model_hash(files, memo)
    files[1].write_bytes(b"[]")
    os.utime(files[1], ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert model_hash(files, memo) != first


def test_a_file_that_has_just_changed_is_not_remembered(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 10**15)
    model_hash(files, tmp_path / "models.json")
    assert not (tmp_path / "models.json").exists()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"a": 1}', b"[" * 100_000, b'{"PATH": [[1], "zz"]}', b"{"])
def test_a_broken_memo_is_made_anew(files: list[Path], tmp_path: Path, content: bytes) -> None:
    memo = tmp_path / "models.json"
    first = model_hash(files, memo)
    memo.write_bytes(content.replace(b"PATH", str(files[0]).encode()))
    assert model_hash(files, memo) == first
    assert set(json.loads(memo.read_text())) == {str(file) for file in files}


def test_what_cannot_be_read_or_written_is_named(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        model_hash([tmp_path / "missing"], tmp_path / "models.json")
    with pytest.raises(CacheDirectoryError, match=r"config\.json"):
        model_hash(files, files[1] / "models.json")
