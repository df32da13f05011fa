"""`paceline quantize`: what it refuses before any work, what it prints, and that a kill loses no finished layer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import file_config, write_directory_model, write_gguf_model

from paceline.cli.main import main
from paceline.cli.quantize import work_path
from paceline.config import RopeConfig
from paceline.weights.checkpoint import open_checkpoint

TEXT = "A quick brown fox, seven lazy dogs and the number 1,024 met at the river. " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_gguf_model(folder / "tiny.gguf", file_config())
    (folder / "text.txt").write_text(TEXT)
    return folder


def words(folder: Path, out: Path, more: str = "") -> list[str]:
    flags = f"--group 32 --format paceline --calibration {folder / 'text.txt'} --calibration-tokens 512 {more}"
    return ["quantize", str(folder / "tiny.gguf"), str(out), *flags.split()]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_gptq_ends_with_a_table_and_leaves_no_work(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(folder, out)) == 0
    printed = capsys.readouterr()
    for kind in ("attn_q", "attn_output", "ffn_down"):
        (line,) = [line for line in printed.out.splitlines() if line.startswith(kind)]
        assert line.count("%") == 2
    assert f"paceline eval {out} --reference {folder / 'tiny.gguf'}:f32" in printed.out
    assert "error of outputs" in printed.out
    assert "calibrated on 512 tokens of text.txt" in printed.out
    assert printed.err == ""  # no bar where nobody watches
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert open_checkpoint(out).tensor("blk.0.ffn_up.weight").kind == "Q4G32Z"


def test_the_same_command_gives_the_same_bytes_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    for name, more in (("a", ""), ("b", ""), ("c", "--seed 1"), ("d", "--recipe plain")):
        assert main(words(folder, tmp_path / name, more)) == 0
    first, again, seeded, plain = (contents(tmp_path / name) for name in "abcd")
    assert first == again
    assert len({first["model.safetensors"], seeded["model.safetensors"], plain["model.safetensors"]}) == 3


def test_rounding_looks_at_no_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"quantize {folder / 'tiny.gguf'} {tmp_path / 'out'} --method rtn --bits 8 --group channel --sym"
    assert main(command.split()) == 0
    assert "error of weights" in capsys.readouterr().out


def test_a_gguf_file_has_the_groups_that_it_can_have(folder: Path, tmp_path: Path) -> None:
    command = f"quantize {folder / 'tiny.gguf'} {tmp_path / 'out.gguf'} --method rtn --format gguf"
    assert main(command.split()) == 0
    assert open_checkpoint(tmp_path / "out.gguf").tensor("blk.0.ffn_up.weight").kind == "Q4_1"


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("--bits 5", "bits=5"),
        ("--group 48", "group=48"),
        ("--group many", "many"),
        ("--method rtn", "calibration"),
        ("--format awq --bits 3", "awq"),
        ("--format gguf --group 64", "--group 32"),
        ("--head-bits 4 --format gptq", "--head-bits"),
        ("--calibration nowhere.txt", "nowhere.txt"),
        ("--calibration-tokens 0", "--calibration-tokens"),
        ("--recipe secret", "--recipe"),
        ("--seed -1", "seed=-1"),
    ],
)
def test_what_does_not_go_together_is_one_line_before_any_work(
    folder: Path, tmp_path: Path, more: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words(folder, tmp_path / "out", more))
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert names in error
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_does_not_divide_offers_those_that_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gguf_model(tmp_path / "narrow.gguf", file_config(intermediate_size=192))
    assert main(["quantize", str(model), str(tmp_path / "out"), "--group", "128"]) == 2
    error = capsys.readouterr().err
    assert "ffn_down" in error
    assert "192 inputs; possible are 64 or 32 or channel" in error
    assert [path.name for path in tmp_path.iterdir()] == ["narrow.gguf"]


def test_what_the_files_of_a_format_cannot_say_is_known_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that no name of GGUF files stands for; heads of which a half rotates, in a config.json."""
    model = write_directory_model(tmp_path / "model", file_config())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    half = write_gguf_model(tmp_path / "half.gguf", file_config(rope=RopeConfig(theta=1e4, dim=8)))
    monkeypatch.setattr("paceline.quantize.pipeline.quantize_model", None)  # not even begun
    flags = f"{tmp_path / 'out'} --method rtn --group 32 --format"
    for source, fmt, problem in ((model, "gguf", "no pre-tokenizer"), (half, "gptq", "of which 8 rotate")):
        assert main(["quantize", str(source), *flags.split(), fmt]) == 1
        assert problem in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half.gguf", "model"]


def test_what_exists_stays_without_force(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(words(folder, out, "--recipe plain")) == 0
    before = contents(out)
    assert main(words(folder, out)) == 1
    assert "--force" in capsys.readouterr().err
    assert contents(out) == before
    assert main(words(folder, out, "--force")) == 0
    assert contents(out) != before


KILLED = """
import os, signal, sys
from paceline.cli.main import main
from paceline.quantize import work
saved = 0
write = work._write
def write_or_die(path, data):
    global saved
    saved += path.name.startswith("stage")
    if saved == 4:
        path.with_name(path.name + ".new").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)
work._write = write_or_die
main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_and_gives_the_bytes_of_a_whole_one(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, tmp_path / "whole" / "out")) == 0
    out = tmp_path / "out"
    assert main(words(folder, out, "--recipe plain")) == 0
    old = contents(out)
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", KILLED, *words(folder, out, "--force")]
    killed = subprocess.run(command, env=environment, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert contents(out) == old
    finished = {path.name: path.stat().st_mtime_ns for path in work_path(out).glob("stage-*") if path.suffix == ""}
    assert len(finished) == 3
    assert main(words(folder, out, "--force")) == 0
    assert contents(out) == contents(tmp_path / "whole" / "out")
    assert not work_path(out).exists()
