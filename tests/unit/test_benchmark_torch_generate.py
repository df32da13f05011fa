"""benchmarks/torch_generate.py on a tiny model: both answer in turns, and the figures are those of the rounds."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import synthetic
import torch_generate


def test_rounds_are_answered_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic.write_safetensors(tmp_path / "model", synthetic.SHAPES["tiny"], shard_bytes=200_000)
    asked: list[str] = []
    for name in ("generate", "serve"):
        answer = getattr(torch_generate, name)
        monkeypatch.setattr(
            torch_generate, name, lambda *rest, name=name, answer=answer: (asked.append(name), answer(*rest))[1]
        )
    before = torch.get_num_threads()
    words = ["--rounds", "3", "--new-tokens", "5", "--prompt-tokens", "7", "--threads", "1", "--json"]
    assert torch_generate.main(["--model", str(tmp_path / "model"), "--dtype", "float32", *words]) == 0
    torch.set_num_threads(before)
    assert asked == ["generate", "serve"] * 4, "the first round only warms up"
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = document["results"]
    assert (result["path"]["isa"], result["path"]["weights"]) == ("torch cpu", "f32")
    rates = {name: [one["tokens_per_s"] for one in result[name]["rounds"]] for name in ("transformers", "paceline")}
    assert {len(each) for each in rates.values()} == {3}
    assert result["paceline"]["decode_tokens_per_s"] == statistics.median(rates["paceline"])
    ratios = [mine / theirs for mine, theirs in zip(rates["paceline"], rates["transformers"], strict=True)]
    assert result["decode_ratio"] == pytest.approx(statistics.median(ratios))
    assert result["first_difference"] in (None, 0, 1, 2, 3, 4)


def test_both_choose_the_same_tokens(tmp_path: Path) -> None:
    """The seeded model has no two logits nearly equal on the way."""
    from paceline.llm import LLM

    synthetic.write_safetensors(tmp_path / "model", synthetic.SHAPES["tiny"], shard_bytes=200_000)
    prompt = [5, 9, 3, 8, 1]
    theirs = torch_generate.generate(torch_generate.load_transformers(tmp_path / "model", "float32"), prompt, 12)
    with LLM(str(tmp_path / "model"), executor="torch", weights="f32", kv_dtype="f32", speculate="off") as llm:
        mine = torch_generate.serve(llm, prompt, 12)
    assert mine.tokens == theirs.tokens
    assert len(set(mine.tokens)) > 2
