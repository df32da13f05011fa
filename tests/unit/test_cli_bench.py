"""`paceline bench`: the JSON documents, the record, and what is measured, on an engine without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_llm import VOCAB, byte_llm
from fake_executor import FakeExecutor, tiny_model

from paceline.cli import bench
from paceline.cli.main import main
from paceline.config import EngineConfig
from paceline.executors.rows_plan import rows_plan
from paceline.llm import LLM
from paceline.machine import processor_name
from paceline.measure import load, record
from paceline.measure.load import measure_batch, measure_decode, measure_prefill
from paceline.measure.prompts import prompt_tokens
from paceline.measure.record import Measurement
from paceline.measure.roofline import Peaks, Traffic, Work
from paceline.measure.verify_cost import measure_verify_cost

TRAFFIC = Traffic(layer_bytes=1000, head_bytes=300, kv_bytes=8, layer_operations=4000, head_operations=900)
DOCUMENT_KEYS = {"metric", "median", "min", "max", "runs", "path", "limit"}
LIMIT_KEYS = {"bytes_per_token", "bandwidth_gb_s", "int8_gops", "limit_tokens_per_s", "fraction"}


def probe(isa: str, num_threads: int) -> Peaks:
    assert (isa, num_threads) == ("fake", 1), "peaks are measured with the path that ran"
    return Peaks(bandwidth_gb_s=10.0, int8_gops=100.0)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with byte_llm(config=EngineConfig(max_batch=8, token_budget=32)) as opened:
        yield opened


def test_document_of_a_measurement() -> None:
    measurement = Measurement(
        metric="decode_tokens_per_s",
        runs=(30.0, 10.0, 20.0),
        path={"isa": "x"},
        work=Work(bytes_per_token=1e8, operations_per_token=1e6),
        peaks=Peaks(bandwidth_gb_s=10.0, int8_gops=100.0),
        details={"depth": 5},
    )
    assert measurement.document() == {
        "metric": "decode_tokens_per_s",
        "median": 20.0,
        "min": 10.0,
        "max": 30.0,
        "runs": [30.0, 10.0, 20.0],
        "path": {"isa": "x"},
        "limit": {
            "bytes_per_token": 1e8,
            "bandwidth_gb_s": 10.0,
            "int8_gops": 100.0,
            "limit_tokens_per_s": pytest.approx(100.0),
            "fraction": pytest.approx(0.2),
        },
        "depth": 5,
    }


def test_decode_times_every_run_after_a_warm_up(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    measurement = measure_decode(
        llm, TRAFFIC, num_prompt=10, num_new=7, num_runs=3, report=lambda *at: seen.append(at), probe=probe
    )
    assert len(measurement.runs) == 3
    assert all(run > 0 for run in measurement.runs)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert llm.stats().output_tokens == 4 * 7, "the end of text does not end a benchmark"
    assert measurement.details == {"prompt_tokens": 10, "new_tokens": 7}


@pytest.mark.parametrize(
    ("measure", "sizes"),
    [(measure_decode, {"num_new": 3}), (measure_prefill, {}), (measure_batch, {"num_requests": 4, "num_new": 3})],
)
def test_no_run_finds_what_another_computed(llm: LLM, measure: Any, sizes: dict[str, int]) -> None:
    measure(llm, TRAFFIC, num_prompt=70, num_runs=3, probe=probe, **sizes)
    assert llm.stats().cache_query_tokens == 4 * 70 * sizes.get("num_requests", 1)
    assert llm.stats().cache_saved_tokens == 0
    llm.generate([65] * 70)
    llm.generate([65] * 70)
    assert llm.stats().cache_saved_tokens >= 69, "the cache is on: it would have been found"


def test_prefill_counts_prompt_tokens(llm: LLM) -> None:
    measurement = measure_prefill(llm, TRAFFIC, num_prompt=40, num_runs=3, probe=probe)
    assert len(measurement.runs) == 3
    assert llm.stats().output_tokens == 4
    assert measurement.details == {"prompt_tokens": 40, "chunk_tokens": 32}


def test_batch_runs_all_requests(llm: LLM) -> None:
    measurement = measure_batch(llm, TRAFFIC, num_requests=12, num_prompt=9, num_new=5, num_runs=2, probe=probe)
    assert len(measurement.runs) == 2
    assert llm.stats().output_tokens == 3 * 12 * 5
    assert measurement.details["concurrency"] == 8
    assert set(measurement.details["ttft_s"]) == {"p50", "p95", "p99"}
    document = measurement.document()
    assert set(document) >= DOCUMENT_KEYS
    assert set(document["limit"]) == LIMIT_KEYS


def test_benchmark_that_did_not_do_its_work_fails() -> None:
    with (
        byte_llm(context_length=64, config=EngineConfig(max_batch=8, token_budget=32)) as llm,
        pytest.raises(AssertionError, match="length"),
    ):
        measure_decode(llm, TRAFFIC, num_prompt=60, num_new=7, num_runs=1, probe=probe)


def test_verify_cost_keys_every_size() -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB))
    with byte_llm() as llm:
        prompt = prompt_tokens(llm.tokenizer, 70 + 64)
    measurement = measure_verify_cost(executor, TRAFFIC, prompt, depth=70, num_runs=2, probe=probe)
    document = measurement.document()
    sizes = [str(n) for n in range(1, 65)]
    assert list(document["relative"]) == list(document["step_ms"]) == sizes
    assert document["relative"]["1"] == 1.0
    assert document["relative"]["8"] == pytest.approx(document["step_ms"]["8"] / document["step_ms"]["1"])
    assert document["median"] == document["step_ms"]["1"]
    assert len(document["runs"]) == 2
    assert document["limit"]["fraction"] == pytest.approx(
        1e3 / document["median"] / document["limit"]["limit_tokens_per_s"]
    )
    # The cache is filled once; each round then runs 1..64 rows, all with logits.
    assert executor.log[1:] == [(n, 1, n) for n in range(1, 65)] * 3
    assert executor.log[0] == (70, 1, 1)


def test_rows_plan_addresses_the_pages_of_its_positions() -> None:
    plan = rows_plan([5, 6, 7, 8], 30, num_outputs=2)
    assert plan.positions.tolist() == [30, 31, 32, 33]
    assert plan.page_table.tolist() == [[0, 1]]
    assert plan.logit_rows.tolist() == [2, 3]
    assert plan.samples.rows["position"].tolist() == [33, 34]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own way to each workload, with an engine that has no model."""
    config = EngineConfig(max_batch=8, token_budget=64)
    monkeypatch.setattr(bench, "open_model", lambda name, given, verbose: (byte_llm(config=config), 0.1))
    monkeypatch.setattr(bench, "_traffic", lambda name, given: TRAFFIC)
    monkeypatch.setattr(load, "measure_peaks", probe)
    for measure in (measure_decode, measure_prefill, measure_batch):
        monkeypatch.setitem(measure.__kwdefaults__, "probe", probe)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ("decode --prompt-tokens 8 --new-tokens 5", "decode_tokens_per_s"),
        ("decode --depth 40 --new-tokens 5", "decode_tokens_per_s"),
        ("prefill --prompt-tokens 90", "prefill_tokens_per_s"),
        ("batch --requests 9 --prompt-tokens 8 --new-tokens 5", "output_tokens_per_s"),
    ],
)
def test_commands_print_one_document(words: str, metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split(), "--runs", "2", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["metric"] == metric
    assert set(document) >= DOCUMENT_KEYS
    assert set(document["limit"]) == LIMIT_KEYS
    assert len(document["runs"]) == 2
    assert document["min"] <= document["median"] <= document["max"]
    assert document["prompt_tokens"] == {"decode --depth": 40}.get(words[:14], document["prompt_tokens"])


@pytest.mark.usefixtures("commands")
def test_summary_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "records" / "run.jsonl"
    for _ in range(2):
        words = ["--new-tokens", "5", "--runs", "2", "--record", str(file)]
        assert main(["bench", "decode", "tiny", *words]) == 0
    shown = capsys.readouterr().out
    assert "decode_tokens_per_s" in shown
    assert "10.0 GB/s" in shown
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    entry = json.loads(lines[0])
    assert entry["model"] == "tiny"
    assert entry["metric"] == "decode_tokens_per_s"
    assert set(entry["environment"]) == {"time", "processor", "system", "python", "paceline", "commit"}


def test_commit_is_only_that_of_the_own_tree(tmp_path: Path) -> None:
    assert record._commit(tmp_path) is None
    assert record._commit(tmp_path / "missing") is None


def test_processor_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Fast One\n")
    assert processor_name(cpuinfo) == "A Fast One"
    assert isinstance(processor_name(tmp_path / "none"), str)
