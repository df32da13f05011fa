"""What the prefix cache on disk gains: an engine finds what the one before it has left, and an answer or a number of
tokens that is not what it must be stops the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_llm import VOCAB, byte_llm
from fake_executor import tiny_model

from paceline.cli import bench
from paceline.cli.main import main
from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.kv.identity import store_key
from paceline.kv.store import PageStore
from paceline.llm import LLM
from paceline.measure.reload import measure_reload
from paceline.measure.roofline import Peaks, Traffic, prefill_work

TRAFFIC = Traffic(layer_bytes=1000, head_bytes=300, kv_bytes=8, layer_operations=4000, head_operations=900)
CONFIG = EngineConfig(max_batch=4, token_budget=64)


def probe(isa: str, num_threads: int) -> Peaks:
    return Peaks(bandwidth_gb_s=10.0, int8_gops=100.0)


def open_in(directory: Path, *, text: str = "on and ") -> LLM:
    """An engine without a model that keeps its cache in ``directory``, until it is closed."""
    llm = byte_llm(text=text, config=CONFIG)
    key = store_key(tiny_model(VOCAB), CONFIG, model_hash=bytes(32), executor="fake")
    store = PageStore.open(directory, key, page_bytes=llm._executor.pages.shape[1], max_bytes=2**20)
    llm._engine.scheduler.kv.use_store(store, llm._executor.pages)
    llm._runner._on_end = store.close
    return llm


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(200, 192), (192, 191), (32, 31), (33, 32)])
def test_the_second_engine_computes_what_is_no_whole_page(num_prompt: int, num_cached: int) -> None:
    opened: list[tuple[LLM, Path]] = []

    def remembered(directory: Path) -> LLM:
        opened.append((open_in(directory), directory))
        return opened[-1][0]

    seen: list[tuple[int, int]] = []
    measurement = measure_reload(
        remembered, TRAFFIC, num_prompt=num_prompt, num_runs=2, report=lambda *at: seen.append(at), probe=probe
    )
    assert seen == [(1, 2), (2, 2)]
    assert [llm.stats().cache_saved_tokens for llm, _ in opened] == [0, num_cached] * 2
    directories = [directory for _, directory in opened]
    assert directories[0] == directories[1] != directories[2] == directories[3]
    assert not any(directory.exists() for directory in directories), "nothing is left behind"
    details = measurement.details
    assert (details["prompt_tokens"], details["cached_tokens"]) == (num_prompt, num_cached)
    pairs = zip(details["prefill_runs_s"], details["reload_runs_s"], strict=True)
    assert list(measurement.runs) == [before / after for before, after in pairs]
    assert details["speedup"] == measurement.median
    num_new = num_prompt - num_cached
    assert measurement.work == prefill_work(TRAFFIC, num_tokens=num_new, chunk=64, num_cached=num_cached)
    assert measurement.achieved_tokens_per_s == pytest.approx(num_new / details["reload_s"])


def test_an_answer_that_differs_after_the_restart_stops_the_benchmark() -> None:
    texts = iter(["on and ", "and on "])
    with pytest.raises(AssertionError, match="changed an answer"):
        measure_reload(lambda at: open_in(at, text=next(texts)), TRAFFIC, num_prompt=200, num_runs=1, probe=probe)


def test_pages_that_were_not_kept_stop_the_benchmark() -> None:
    with pytest.raises(AssertionError, match="0 tokens found, not 192"):
        measure_reload(lambda _: byte_llm(config=CONFIG), TRAFFIC, num_prompt=200, num_runs=1, probe=probe)


def test_a_prompt_without_a_whole_page_is_refused() -> None:
    with pytest.raises(ParameterError, match="prompt_tokens=31"):
        measure_reload(open_in, TRAFFIC, num_prompt=31, probe=probe)


def test_command_prints_one_document_or_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_model(name: str, config: EngineConfig, verbose: bool) -> tuple[LLM, float]:
        assert config.kv_dir is not None
        return open_in(Path(config.kv_dir)), 0.1

    monkeypatch.setattr(bench, "open_model", open_model)
    monkeypatch.setattr(bench, "_traffic", lambda name, given: TRAFFIC)
    monkeypatch.setitem(measure_reload.__kwdefaults__, "probe", probe)
    words = ["bench", "reload", "--prompt-tokens", "200", "--runs", "2"]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["metric"] == "reload_speedup"
    assert {"reload_s", "prefill_s", "speedup", "limit"} <= set(document)
    assert len(document["runs"]) == 2
    assert main(words) == 0
    lines = capsys.readouterr().out
    assert lines.startswith("reload_speedup")
    assert "192 of 200 tokens" in lines


def test_command_has_directories_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reload", "--kv-dir", "kept"]) != 0
    assert "leave --kv-dir out" in capsys.readouterr().err
