"""`paceline eval` on the packaged model: the JSON document, the table, and one line for what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main

MODEL = "smollm2-135m"
FIELDS = {"model", "bytes", "perplexity", "kl_mean", "kl_mean_ci", "kl_p99", "kl_p999", "top1_agreement", "tokens"}


def test_document_of_two_forms_of_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", MODEL, f"{MODEL}:int8,kv=int8", "--tokens", "200", "--context", "128", "--json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["windows"] == {"kind": "sliding", "context": 128, "stride": 64, "number": 3}
    assert document["reference"]["path"]["weights"] == "f32"
    native, int8 = document["models"]
    assert native.keys() >= FIELDS
    assert (native["tokens"], native["kl_mean_ci"]) == (199, None)
    assert native["file_bytes"] == 98_362_432
    assert int8["path"] | {"isa": "", "threads": 0} == {
        "isa": "", "threads": 0, "weights": "int8", "kv_dtype": "int8", "head": "int8"
    }  # fmt: skip
    # Activations are rounded to int8 in both: a mean KL of about 0.003.
    for model in (native, int8):
        assert 0.0005 < model["kl_mean"] < 0.02
        assert 0.9 < model["top1_agreement"] <= 1.0
        assert model["perplexity_ratio"] == pytest.approx(1.0, abs=0.03)


def test_table_of_a_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi! How can I help you?"}]
    chat.write_text(json.dumps(turns))
    assert main(["eval", MODEL, "--chat", str(chat), "--reference", "none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[0] == MODEL
    assert "the assistant in" in lines[-1]
    # "Hi! How can I help you?" and <|im_end|>, not the line break that the template puts behind it.
    assert lines[-1].startswith("9 tokens of")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--text", "no such file"], 2, "No such file"),
        (["--context", "9000"], 2, "made for (8192)"),
        (["--stride", "513"], 2, "between 1 and"),
        (["--windows", "chunks", "--stride", "4"], 2, "chunks lie side by side"),
        (["--reference", "nobody"], 1, "no model 'nobody'"),
        (["--reference", f"{MODEL}:f12"], 2, "weights=FORMAT"),
        (["--windows", "chunks", "--tokens", "100"], 2, "which has 100 tokens"),
        (["--tokens", "1"], 2, "two tokens"),
        (["--speed", "--context", "256"], 2, "at least 320"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str) -> None:
    assert main(["eval", MODEL, *words]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1
