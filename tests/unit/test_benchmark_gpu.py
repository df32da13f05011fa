"""benchmarks/gpu.py tried out on a CPU: its document, its limits, and what it leaves out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu
import gpu_engines
from gpu_engines import Job, LeftOutError
from synthetic import SHAPES

SMALL = ["--device", "cpu", "--shape", "tiny", "--depth", "5", "--new", "2", "--batch", "2", "--prompt", "9"]
CPU = torch.device("cpu")


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The last line of a run of everything."""
    monkeypatch.setattr(gpu, "measure_peaks", lambda *_, **__: gpu.Peaks(1e9, 2e9, 3e9))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert gpu.main([*SMALL, "--runs", "2", "--output", str(tmp_path / "record")]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "record").read_text() == lines[-1] + "\n"
    assert any(line.startswith("tiny   int4    paceline      prefill") for line in lines)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_the_document(document: dict[str, Any]) -> None:
    measured = {(line["weights"], line["engine"], line["workload"]) for line in document["results"]}
    engines = [("bf16", "paceline"), ("int4", "paceline"), ("bf16", "transformers")]
    assert measured == {(*engine, workload) for engine in engines for workload in gpu.WORKLOADS}
    for line in document["results"]:
        assert len(line["runs"]) == 2
        assert line["tokens_per_s"] > 0
        assert line["fraction"] == line["tokens_per_s"] / line["limit_tokens_per_s"]
    assert {(entry["weights"], entry["engine"]) for entry in document["left_out"]} == {
        ("bf16", "vllm"),
        ("int4", "vllm"),
        ("int4", "transformers"),
    }
    assert document["device"]["type"] == "cpu"
    assert document["peaks"]["read_bytes_per_s"] == 1e9
    assert document["arguments"] == {"depth": 5, "new": 2, "batch": 2, "prompt": 9, "runs": 2}


def test_limits() -> None:
    """One matrix of a layer more is so many bytes more; keys and values are read for each sequence."""
    config, job, peaks = SHAPES["8b"].config(), Job(512, 128, 32, 2048), gpu.Peaks(4.8e12, 0.0, 9e14)
    weight_bytes = 2 * gpu_engines.num_weights(config)
    assert 14.5e9 < weight_bytes < 15.5e9
    alone, together = (gpu.limit_tokens_per_s(peaks, config, name, job, weight_bytes) for name in ("decode", "batch"))
    assert alone == 4.8e12 / (weight_bytes + 2 * 2 * 32 * 1024 * 576)
    assert 25 * alone < together < 32 * alone
    assert 55_000 < gpu.limit_tokens_per_s(peaks, config, "prefill", job, weight_bytes) < 70_000


def test_paceline_continues_as_its_own_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a batch are fed their own tokens: alone they get the same ones."""
    job = Job(6, 3, 3, 8)
    torch.manual_seed(0)
    engine = gpu_engines.Paceline(SHAPES["tiny"], "int4", job, CPU)
    tokens = gpu_engines.prompts(1, 3, 6, 512)
    steps = [engine._step(row[None], np.zeros(1, "i4"), first=index) for index, row in enumerate(tokens)]
    first = np.concatenate(steps)
    second = engine._step(first[:, None], np.full(3, 6, "i4"))
    whole = np.concatenate([tokens, first[:, None]], axis=1)
    again = [engine._step(row[None], np.zeros(1, "i4"), first=index) for index, row in enumerate(whole)]
    assert second.tolist() == np.concatenate(again).tolist()


def test_what_cannot_be_done_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(5, 2, 2, 9)
    with pytest.raises(LeftOutError, match="4-bit"):
        gpu_engines.Transformers(SHAPES["tiny"], "int4", job, CPU)
    with pytest.raises(LeftOutError, match="CUDA only"):
        gpu_engines.VLLM(SHAPES["tiny"], "bf16", job, CPU)
    assert gpu.fits_context(SHAPES["tiny"], replace(job, prompt=600)) == "601 tokens are more than its context of 512"
    assert gpu.fits_context(SHAPES["tiny"], job) is None
    monkeypatch.setattr(gpu_engines, "free_bytes", lambda device: 10**6)
    with pytest.raises(LeftOutError, match="GB of memory"):
        gpu_engines.Paceline(SHAPES["tiny"], "bf16", job, CPU)


@pytest.mark.parametrize("wrong", [["--new", "1"], ["--runs", "0"], ["--batch", "0"], ["--weights", "int3"]])
def test_wrong_arguments(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse([*SMALL, *wrong])
