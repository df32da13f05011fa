"""What the prefix cache gains: both ways give the same tokens, only one computes the common part once, and an answer
that the cache changed stops the benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from byte_llm import byte_llm

from paceline.cli import bench
from paceline.cli.main import main
from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.measure import prefix
from paceline.measure.gap import NUM_ALONE, Gaps, measure_gap
from paceline.measure.prefix import measure_chat, measure_prefix
from paceline.measure.roofline import Peaks, Traffic, prefill_work

TRAFFIC = Traffic(layer_bytes=1000, head_bytes=300, kv_bytes=8, layer_operations=4000, head_operations=900)
CONFIG = EngineConfig(max_batch=4, token_budget=64)
SIZES = {"num_requests": 6, "num_prefix": 96, "num_tail": 9, "num_new": 5}


def probe(isa: str, num_threads: int) -> Peaks:
    return Peaks(bandwidth_gb_s=10.0, int8_gops=100.0)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with byte_llm(config=CONFIG) as opened:
        yield opened


def test_prefix_is_computed_once_with_the_cache_and_each_time_without(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    measurement = measure_prefix(llm, TRAFFIC, **SIZES, num_runs=2, report=lambda *at: seen.append(at), probe=probe)
    details = measurement.details
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert details["query_tokens"] == 6 * 105
    # All but the first request find the prefix: whole pages, which can be shared while they are computed.
    assert details["hit_tokens"] == details["saved_tokens"] == 5 * 96
    assert llm.stats().cache_saved_tokens == 3 * 5 * 96, "nothing was found without"
    assert len(details["with_runs_s"]) == len(details["without_runs_s"]) == len(measurement.runs) == 2
    ratios = [b / a for a, b in zip(details["with_runs_s"], details["without_runs_s"], strict=True)]
    assert list(measurement.runs) == ratios
    assert details["speedup"] == measurement.document()["median"] == pytest.approx(sum(ratios) / 2)
    limit = measurement.document()["limit"]
    assert limit["fraction"] == pytest.approx(6 * 5 / details["with_s"] / limit["limit_tokens_per_s"])


@pytest.mark.parametrize("measure", [measure_prefix, measure_chat])
def test_benchmarks_of_the_cache_need_it(measure: Any) -> None:
    with (
        byte_llm(config=replace(CONFIG, prefix_cache=False)) as llm,
        pytest.raises(ParameterError, match="prefix_cache"),
    ):
        measure(llm, TRAFFIC, probe=probe)


def test_an_answer_that_differs_with_the_cache_stops_the_benchmark(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = prefix._answer

    def planted(llm: LLM, prompts: Any, domains: Any, num_new: int) -> Any:
        load = answer(llm, prompts, domains, num_new)
        if len(set(domains)) == 1:
            load.tokens[3][-1] += 1
        return load

    monkeypatch.setattr(prefix, "_answer", planted)
    with pytest.raises(AssertionError, match="changed an answer"):
        measure_prefix(llm, TRAFFIC, **SIZES, num_runs=1, probe=probe)


def test_a_hit_across_domains_stops_the_benchmark(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "cold_domain", lambda: "one for all")
    with pytest.raises(AssertionError, match="across cache domains"):
        measure_prefix(llm, TRAFFIC, **SIZES, num_runs=1, probe=probe)


def test_chat_computes_only_what_is_new() -> None:
    with byte_llm(text="Yes, it is so. ", config=CONFIG) as llm:
        measurement = measure_chat(llm, TRAFFIC, num_turns=4, num_new=12, num_runs=2, probe=probe)
    details = measurement.details
    prompts, cached = details["prompt_tokens"], details["cached_tokens"]
    assert cached[0] == 0
    # A token is a byte, so what an answer's text is made of is what was drawn; the last one drawn is not computed.
    assert cached[1:] == [before + 12 - 1 for before in prompts[:-1]]
    assert len(details["ttft_s"]) == 4
    assert details["share"] == pytest.approx(sum(measurement.runs) / 2)
    assert all(share > 0 for share in measurement.runs)
    num_new = prompts[-1] - cached[-1]
    work = prefill_work(TRAFFIC, num_tokens=num_new, chunk=64, num_cached=cached[-1])
    assert measurement.work == work
    assert measurement.achieved_tokens_per_s == pytest.approx(num_new / details["ttft_s"][-1])


def test_chat_asks_the_cold_cache_for_the_same_when_the_model_would_rather_end() -> None:
    with byte_llm(text="\0Yes.", config=CONFIG) as llm:
        assert llm.generate("assistant: ").finish_reason == "stop"
        assert measure_chat(llm, TRAFFIC, num_turns=2, num_new=5, num_runs=1, probe=probe).runs


def test_chat_without_a_template_and_impossible_turns(llm: LLM) -> None:
    with byte_llm(chat=False, text="Yes, it is so. ", config=CONFIG) as plain:
        details = measure_chat(plain, TRAFFIC, num_turns=2, num_new=12, num_runs=1, probe=probe).details
    assert not details["chat_template"]
    assert details["cached_tokens"][1] == details["prompt_tokens"][0] + 11
    for num_turns in (1, 11):
        with pytest.raises(ParameterError, match="turns"):
            measure_chat(llm, TRAFFIC, num_turns=num_turns, probe=probe)


def test_gap_watches_an_answer_beside_a_prompt_with_and_without_a_bound() -> None:
    opened: list[LLM] = []

    def open_bounded(max_gap_ms: float | None) -> LLM:
        opened.append(byte_llm(text="on and ", config=replace(CONFIG, max_gap_ms=max_gap_ms)))
        return opened[-1]

    measurement = measure_gap(open_bounded, TRAFFIC, max_gap_ms=50.0, num_prompt=640, num_runs=2, probe=probe)
    details = measurement.details
    assert [llm.config.max_gap_ms for llm in opened] == [50.0, None] * 2
    assert all(llm.stats().num_running == 0 for llm in opened), "the answer is aborted"
    assert len(measurement.runs) == 2
    for figures in (details, details["unbounded"]):
        gap_ms = figures["gap_ms"]
        assert 0 < gap_ms["p50"] <= gap_ms["p95"] <= gap_ms["p99"] <= gap_ms["max"]
        assert figures["prefill_s"] > 0
        assert figures["alone_gap_ms"] > 0
    assert measurement.achieved_tokens_per_s == pytest.approx(640 / details["prefill_s"])


def test_gaps_count_from_the_prompts_submission_to_its_first_token() -> None:
    times_s = [0.0, 1.0, 2.0, 4.0, 7.0, 8.0, 9.0]
    gaps = Gaps.of(times_s, submitted_s=2.0, prefill_s=5.0)
    assert gaps.alone_s == [1.0, 1.0]
    # The token at 7.0 comes with the step that ends the prompt, or just after it.
    assert gaps.during_s == [2.0, 3.0]
    assert Gaps.of(times_s, submitted_s=2.0, prefill_s=4.9).during_s == [2.0, 3.0]
    assert Gaps.of(times_s, submitted_s=2.0, prefill_s=5.1).during_s == [2.0, 3.0, 1.0]


def test_gap_needs_room_for_the_prompt() -> None:
    def open_bounded(max_gap_ms: float | None) -> LLM:
        return byte_llm(text="on and ", context_length=256, config=CONFIG)

    with pytest.raises(ParameterError, match="prompt_tokens=256"):
        measure_gap(open_bounded, TRAFFIC, max_gap_ms=50.0, num_prompt=256, probe=probe)


def test_answer_that_ends_too_early_is_no_measurement() -> None:
    def open_bounded(max_gap_ms: float | None) -> LLM:
        return byte_llm(text="on and ", context_length=64 + NUM_ALONE - 5, config=CONFIG)

    with pytest.raises(AssertionError, match="ended before"):
        measure_gap(open_bounded, TRAFFIC, max_gap_ms=50.0, num_prompt=40, probe=probe)


@pytest.mark.parametrize(
    ("words", "metric", "shown"),
    [
        (
            "prefix --requests 5 --prefix-tokens 64 --tail-tokens 9 --new-tokens 3 --concurrency 2",
            "prefix_speedup",
            "256 of 365 prompt tokens not computed",
        ),
        ("chat --turns 2 --new-tokens 4", "chat_ttft_share", "of the last turn's"),
        ("gap --prompt-tokens 300 --max-gap-ms 30", "gap_p99_ms", "bound 30 ms"),
    ],
)
def test_commands_print_one_document_or_lines(
    words: str, metric: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[EngineConfig] = []

    def open_model(name: str, config: EngineConfig, verbose: bool) -> tuple[LLM, float]:
        configs.append(config)
        return byte_llm(text="on and ", config=config), 0.1

    monkeypatch.setattr(bench, "open_model", open_model)
    monkeypatch.setattr(bench, "_traffic", lambda name, given: TRAFFIC)
    for measure in (measure_prefix, measure_chat, measure_gap):
        monkeypatch.setitem(measure.__kwdefaults__, "probe", probe)
    assert main(["bench", *words.split(), "--runs", "1", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["metric"] == metric
    assert len(document["runs"]) == 1
    assert set(document["limit"]) >= {"limit_tokens_per_s", "fraction"}
    if metric == "prefix_speedup":
        assert {"with_s", "without_s", "speedup"} <= set(document)
        assert configs[0].max_batch == document["concurrency"] == 2
    if metric == "gap_p99_ms":
        assert [config.max_gap_ms for config in configs] == [30.0, None]
    assert main(["bench", *words.split(), "--runs", "1"]) == 0
    lines = capsys.readouterr().out
    assert shown in lines
    assert lines.startswith(metric)
