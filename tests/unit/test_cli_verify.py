"""`paceline verify`: the table, the JSON document and the exit status, on an engine without a model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import verify as command
from paceline.cli.main import main
from paceline.config import EngineConfig
from paceline.measure import verification
from paceline.measure.cells import Host
from paceline.measure.losslessness import Difference, Rounding
from paceline.measure.trace import TopTwo
from paceline.measure.verification import Proof, Result

PATH: dict[str, str | int] = {
    "isa": "avx2",
    "threads": 1,
    "weights": "native",
    "kv_dtype": "f16",
    "speculation": "off",
}
EQUAL = Result("batch", "batch 2 · 2 threads", "EQUAL", 24, 0.5)
TIE = Result(
    "kv", "int8 KV against f16 KV", "TIE", 139, 1.0, rounding=Rounding(139, 0.0625, 0.5, 0.0031, 0.125, 0.53125)
)
DIFFERENCE = Difference(
    "long", 201, "token 9 instead of 5", TopTwo((5, 9), (12.5, 12.25)), TopTwo((9, 5), (12.375, 12.25))
)
FAIL = Result("chunk", "chunk 16 · 2 threads", "FAIL", 24, 0.7, difference=DIFFERENCE)
NOT_TAKEN = [
    Result("sampling", name, "FAIL", 0, 0.1, problem="path not taken: no request was preempted") for name in "ab"
]


def proof(*results: Result) -> Proof:
    return Proof(PATH, results, 12.0)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], *results: Result
) -> tuple[int, str, dict[str, object]]:
    """Status, output, and what the matrix was asked to do."""
    asked: dict[str, object] = {}

    def verify(load: object, config: EngineConfig, host: Host, *, full: bool, report: object) -> Proof:
        asked.update(config=config, host=host, full=full)
        return proof(*results)

    monkeypatch.setattr(command, "fetch_model", lambda name: Path(name))
    monkeypatch.setattr(verification, "verify", verify)
    status = main(["verify", "tiny.gguf", *words])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out, asked


def test_table_of_a_proof(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, asked = run(monkeypatch, capsys, [], EQUAL, replace(EQUAL, varied="batch 7 · 2 threads"), TIE)
    assert status == 0
    assert asked["full"] is False
    lines = shown.splitlines()
    assert lines[0] == "tiny.gguf · avx2, 1 thread, native weights, f16 KV"
    rows = [line.split() for line in lines[5:8]]
    assert rows[0] == ["batch", "batch", "2", "·", "2", "threads", "EQUAL", "24", "0.5", "s"]
    assert rows[1][0] == "batch", "the name of a dimension stands once"
    assert rows[1][1] == "7"
    assert "TIE" in rows[2]
    assert "mean KL 0.00310; logits move by 0.062 (at most 0.500)" in shown
    assert "after 139 positions, at a margin of 0.125 (at most 0.531)" in shown
    assert lines[-1] == "2 EQUAL · 1 TIE · 12 s in all"


def test_a_failure_is_told_and_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = run(monkeypatch, capsys, ["--full"], EQUAL, FAIL, *NOT_TAKEN)
    assert status == 1
    at = shown.splitlines().index("    FAIL, request 'long', position 201: token 9 instead of 5")
    assert shown.splitlines()[at - 1 : at + 3] == [
        "chunk 16 · 2 threads:",
        "    FAIL, request 'long', position 201: token 9 instead of 5",
        "      plain 5 at 12.5 over 9 at 12.25 (margin 0.25)",
        "      here  9 at 12.375 over 5 at 12.25 (margin 0.125)",
    ]
    assert "a; b:\n    FAIL, path not taken: no request was preempted" in shown
    assert shown.splitlines()[-1] == "1 EQUAL · 3 FAIL · 12 s in all"


def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(FAIL, difference=replace(DIFFERENCE, found=TopTwo((1, 2), (math.nan, -math.inf))))
    status, shown, _ = run(monkeypatch, capsys, ["--json", "--full"], EQUAL, TIE, FAIL, broken)
    document = json.loads(shown)
    assert status == 1
    assert set(document) == {"model", "extent", "verdict", "elapsed_s", "plain_path", "environment", "cells"}
    assert (document["model"], document["extent"], document["verdict"]) == ("tiny.gguf", "full", "FAIL")
    equal, tie, fail, not_finite = document["cells"]
    assert equal["verdict"] == "EQUAL"
    assert tie["rounding"]["mean_kl"] == 0.0031
    assert fail["difference"]["position"] == 201
    assert fail["difference"]["expected"] == {"tokens": [5, 9], "logits": [12.5, 12.25], "margin": 0.25}
    assert fail["difference"]["found"]["margin"] == 0.125
    assert not_finite["difference"]["found"] == {"tokens": [1, 2], "logits": ["nan", "-inf"], "margin": "nan"}


def test_flags_reach_the_matrix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv", "int8", "--weights", "int4", "--threads", "3", "--isa", "scalar"]
    _, _, asked = run(monkeypatch, capsys, words, EQUAL)
    config, host = asked["config"], asked["host"]
    assert isinstance(config, EngineConfig)
    assert isinstance(host, Host)
    assert (config.kv_dtype, config.weights, config.isa) == ("int8", "int4", "scalar")
    assert host.num_threads == 3
    assert "scalar" not in host.isas
    assert host.kv_formats == ("f16", "bf16", "f32")


@pytest.mark.parametrize("words", [["--max-batch", "4"], ["--no-prefix-cache"], ["--quick", "--full"]])
def test_what_the_matrix_varies_is_no_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
