"""`paceline bench serve`, against servers that answer as the tests say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_server import chat_chunk, counted_words, event, refused, scripted_server, streamed

from paceline.cli.main import main

GOOD = streamed(event(chat_chunk("a")), event(chat_chunk("b", "stop")), event(b"[DONE]"))


def bench(url: str, *flags: str) -> int:
    return main(["bench", "serve", "--url", url, *flags])


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_closed_loop_measures_every_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with scripted_server(counted_words) as server:
        flags = ("--concurrency", "3", "--requests", "9", "--prompt-tokens", "107", "--max-tokens", "5", "--json")
        assert bench(server.url, *flags, "--ttft-ms", "60000", "--record", str(record)) == 0
    shown = document(capsys)
    assert shown["requests"] == {"sent": 9, "succeeded": 9, "failed": 0, "unfinished": 0}
    assert shown["tokens"]["prompt"] == 9 * 107, "prompts have the tokens that were asked for, template included"
    assert shown["tokens"]["output"] == 9 * 5
    assert shown["model"] == "tiny", "the only model that the server names"
    assert shown["load"]["kind"] == "closed"
    assert shown["rates"]["goodput_requests_per_s"] == pytest.approx(shown["rates"]["requests_per_s"])
    assert shown["client"]["cpu_share"] >= 0
    assert shown["environment"]["processor"]
    assert json.loads(record.read_text()) == shown
    load = server.bodies[-9:]
    assert len({body["messages"][0]["content"] for body in load}) == 9
    assert "ignore_eos" not in load[0], "not every server knows it"


def test_an_open_loop_says_how_late_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(counted_words) as server:
        flags = ("--rate", "1000", "--requests", "8", "--max-tokens", "2", "--json")
        assert bench(server.url, *flags) == 0
    shown = document(capsys)
    assert shown["load"]["kind"] == "poisson"
    assert shown["client"]["lateness_ms"]["count"] == 8
    assert shown["client"]["lateness_ms"]["min"] >= 0


def test_a_trace_sets_lengths_and_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 800 * (at + 1), "output_length": 16, "hash_ids": [at]} for at in range(3)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with scripted_server(counted_words) as server:
        flags = ("--trace", "--data", str(trace), "--length-scale", "0.125", "--max-prompt-tokens", "250")
        assert bench(server.url, *flags, "--json", "--ignore-eos", "--extra", '{"top_k": 3}') == 0
    shown = document(capsys)
    assert shown["requests"]["succeeded"] == 2
    assert shown["data"]["left_out"] == 1
    # 2 tokens a word and 7 more: 100 tokens are 46 or 47 words.
    assert shown["tokens"]["prompt"] == pytest.approx(100 + 200, abs=2)
    assert shown["tokens"]["output"] == 2 * 2
    assert (server.bodies[-1]["ignore_eos"], server.bodies[-1]["top_k"]) == (True, 3)


def test_written_prompts_go_to_completions_with_the_key(tmp_path: Path) -> None:
    data, key = tmp_path / "data.jsonl", tmp_path / "key"
    data.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    key.write_text("sesame\n")
    with scripted_server(GOOD) as server:
        flags = ("--concurrency", "1", "--requests", "3", "--warmup", "0", "--model", "m")
        assert bench(server.url, *flags, "--api", "completions", "--data", str(data), "--api-key-file", str(key)) == 0
    assert [body["prompt"] for body in server.bodies] == ["one", "two", "one"], "a file begins anew when it is over"
    assert set(server.keys) == {"Bearer sesame"}
    assert server.bodies[0]["model"] == "m"


def test_the_table_names_latencies_as_other_tools_do(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(GOOD) as server:
        flags = ("--concurrency", "1", "--requests", "2", "--warmup", "0")
        assert bench(server.url, *flags) == 0
        everything = capsys.readouterr().out
        assert bench(server.url, *flags, "--names", "vllm") == 0
        of_vllm = capsys.readouterr().out
    gap, tpot = (next(line for line in everything.splitlines() if line.startswith(name)) for name in ("chunk", "TPOT "))
    assert gap.split()[-5:] == ["ITL", "-", "inter", "chunk", "latency"]
    assert tpot.split()[-5:] == ["TPOT", "ITL", "inter", "token", "latency"]
    assert "the server sent no usage for 2 answers: their chunks were counted" in everything
    assert "in vllm" in of_vllm
    assert "guidellm" not in of_vllm


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refused(401, {"error": {"message": "wrong key"}}), "http_401: wrong key"),
        (refused(404, {"error": {"message": "no model m"}}), "http_404: no model m"),
        (refused(422, {"detail": "odd"}), 'http_422: {"detail": "odd"}'),
        (refused(502, "<h1>Bad gateway</h1>", "text/html"), "http_502: <h1>Bad gateway</h1>"),
        (refused(200, {"choices": []}), "not_a_stream: application/json in place of text/event-stream"),
        (streamed(event(chat_chunk("a"))), "cut_off"),
        (streamed(event({"error": {"message": "broke"}})), "error_event: broke"),
    ],
)
def test_an_endpoint_that_is_none_is_one_line(answer: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(answer) as server:
        assert bench(server.url, "--concurrency", "1") == 1
    error = capsys.readouterr().err
    assert said in error
    assert server.url in error
    assert error.count("\n") == 1


def test_no_server_at_all_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert bench(f"http://127.0.0.1:{port}", "--concurrency", "1") == 1
    assert "connection_failed" in capsys.readouterr().err


def test_several_models_must_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(GOOD, models=("a", "b")) as server:
        assert bench(server.url, "--concurrency", "1") == 1
    assert "serves 2 models (a, b): name one with --model" in capsys.readouterr().err


def test_failures_during_the_load_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    async def sometimes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(len(seen))
        if seen[-1] % 3 == 1:
            return await refused(429, {"error": {"message": "full"}})(request, body)
        if seen[-1] % 3 == 2:
            response = await streamed(event(chat_chunk("a")))(request, body)
            assert request.transport is not None
            request.transport.abort()
            return response
        return await GOOD(request, body)

    with scripted_server(sometimes) as server:
        assert (
            bench(server.url, "--concurrency", "1", "--requests", "9", "--warmup", "0", "--model", "m", "--json") == 0
        )
        shown = document(capsys)
    assert shown["requests"] == {"sent": 9, "succeeded": 3, "failed": 6, "unfinished": 0}
    assert {kind: error["count"] for kind, error in shown["errors"].items()} == {"http_429": 3, "connection_lost": 3}
    assert shown["latency_ms"]["ttft"]["count"] == 3


def test_a_run_without_any_answer_is_a_failure_and_shows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "one"}\n')
    with scripted_server(refused(503, {"error": {"message": "loading"}})) as server:
        flags = ("--concurrency", "2", "--requests", "4", "--warmup", "0", "--data", str(data))
        assert bench(server.url, *flags, "--plot", str(tmp_path / "plot.svg")) == 1
    out = capsys.readouterr().out
    assert "0 of 4 succeeded" in out
    assert "4 × http_503: loading" in out


def test_a_kept_connection_that_the_server_closed_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    connections: set[Any] = set()

    async def once_a_connection(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        if request.transport in connections:
            request.transport.abort()
        connections.add(request.transport)
        return await counted_words(request, body)

    with scripted_server(once_a_connection) as server:
        assert bench(server.url, "--concurrency", "2", "--requests", "6", "--max-tokens", "2", "--json") == 0
    shown = document(capsys)
    assert shown["requests"] == {"sent": 6, "succeeded": 6, "failed": 0, "unfinished": 0}
    assert shown["client"]["resent"] > 0


def test_a_server_that_goes_away_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[int] = []

    async def leaving(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answers.append(len(answers))
        if len(answers) > 4:  # two probes, two requests
            assert request.transport is not None
            request.transport.abort()
        return await counted_words(request, body)

    with scripted_server(leaving) as server:
        flags = ("--concurrency", "1", "--requests", "500", "--warmup", "0", "--max-tokens", "2")
        assert bench(server.url, *flags) == 1
    out = capsys.readouterr().out
    assert "2 of 22 succeeded" in out
    assert "20 × connection_lost" in out
    assert "stopped early   the server has gone" in out


def test_ctrl_c_shows_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "one"}\n')
    seen: list[int] = []

    async def interrupting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(len(seen))
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        return await GOOD(request, body)

    with scripted_server(interrupting) as server:
        flags = ("--concurrency", "1", "--requests", "9", "--warmup", "0", "--data", str(data))
        assert bench(server.url, *flags) == 130
    out = capsys.readouterr().out
    assert "2 of 3 succeeded" in out
    assert "1 unfinished" in out
    assert "stopped early   interrupted" in out


def test_a_drawing_is_written(tmp_path: Path) -> None:
    with scripted_server(counted_words) as server:
        for name in ("plot.html", "plot.svg"):
            flags = ("--concurrency", "1", "--requests", "3", "--max-tokens", "4")
            assert bench(server.url, *flags, "--plot", str(tmp_path / name)) == 0
    assert (tmp_path / "plot.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


def test_png_without_matplotlib_is_an_error_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*(name for name in sys.modules if name.startswith("matplotlib")), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with scripted_server(counted_words) as server:
        assert bench(server.url, "--concurrency", "1", "--plot", "x.png") == 1
        assert server.bodies == []
    assert "paceline[eval]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--concurrency", "1", "--plot", "x.jpg"), "plot"),
        (("--concurrency", "1", "--plot", "no/such/directory/x.svg"), "plot"),
        (("--rate", "0"), "rate"),
        (("--rate", "1", "--timeout", "0"), "timeout"),
        (("--rate", "1", "--temperature", "nan"), "temperature"),
        (("--rate", "nan"), "rate"),
        (("--concurrency", "1", "--extra", "[1]"), "extra"),
        (("--concurrency", "1", "--warmup", "-1"), "warmup"),
        (("--concurrency", "1", "--gap-ms", "-1"), "gap_ms"),
        (("--concurrency", "1", "--length-scale", "0"), "length_scale"),
        (("--concurrency", "1", "--duration", "0"), "duration"),
        (("--trace",), "trace"),
    ],
)
def test_impossible_flags_are_named(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:1", *flags) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
