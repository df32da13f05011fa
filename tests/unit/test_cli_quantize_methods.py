"""`paceline quantize --method awq|smoothquant`: what is written is what was asked for, and wrong flags are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import file_config, write_gguf_model

from paceline.cli.main import main
from paceline.weights.checkpoint import open_checkpoint

TEXT = "A quick brown fox, seven lazy dogs and the number 1,024 met at the river. " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_gguf_model(folder / "tiny.gguf", file_config())
    (folder / "text.txt").write_text(TEXT)
    return folder


def command(folder: Path, out: Path, more: str) -> list[str]:
    flags = f"--calibration {folder / 'text.txt'} --calibration-tokens 512 --format paceline {more}"
    return ["quantize", str(folder / "tiny.gguf"), str(out), *flags.split()]


@pytest.mark.parametrize(
    ("more", "kind"), [("--method awq --group 32", "Q4G32Z"), ("--method awq --group 32 --sym", "Q4_0")]
)
def test_awq_writes_codes_and_divided_norms(folder: Path, tmp_path: Path, more: str, kind: str) -> None:
    out = tmp_path / "out"
    assert main(command(folder, out, more)) == 0
    checkpoint = open_checkpoint(out)
    assert checkpoint.tensor("blk.0.ffn_up.weight").kind == kind
    before = open_checkpoint(folder / "tiny.gguf").tensor("blk.0.attn_norm.weight").data
    assert checkpoint.tensor("blk.0.attn_norm.weight").data.tobytes() != before.tobytes()


def test_smoothquant_is_w8a8_without_being_told(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(command(folder, out, "--method smoothquant")) == 0
    assert open_checkpoint(out).tensor("blk.0.ffn_up.weight").kind == "Q8C"


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("--method smoothquant --bits 4", "W8A8"),
        ("--method smoothquant --group 32", "W8A8"),
        ("--method awq --group 32 --recipe best", "--recipe"),
        ("--method awq --group 32 --bits 0", "bits=0"),
        ("--method rtn --group 32", "--calibration"),
        ("--method smoothquant --format gptq", "W8A8"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(
    folder: Path, tmp_path: Path, more: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, tmp_path / "out", more)) == 2
    assert names in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
