"""The comparison of servers: the table's arithmetic, starting and ending programs, and a run over scripted servers."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from scripted_server import counted_words, refused, scripted_server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import serve_compare

from paceline.errors import ParameterError

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    tries = 0

    def do_GET(self):
        Handler.tries += 1
        self.send_response(200 if self.path == "/ready" and Handler.tries > 2 else 503)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_times_are_better_in_the_sense_of_each_figure() -> None:
    rounds = [
        {
            "a": {"output_tokens_per_s": 30.0, "ttft_p95_ms": 10.0},
            "b": {"output_tokens_per_s": 10.0, "ttft_p95_ms": 40.0},
        },
        {
            "a": {"output_tokens_per_s": 20.0, "ttft_p95_ms": 10.0},
            "b": {"output_tokens_per_s": 20.0, "ttft_p95_ms": 20.0},
        },
    ]
    result = serve_compare.compared(rounds)
    assert result["b"]["output_tokens_per_s"] == {"median": 15.0, "runs": [10.0, 20.0], "times": 2.0}
    assert result["b"]["ttft_p95_ms"]["times"] == 3.0
    assert result["a"]["ttft_p95_ms"]["times"] == 1.0
    lines = serve_compare.table({"8": result})
    assert "15.0 (2.00x)" in lines[2]


def test_a_program_is_ready_when_it_says_so_and_ends_with_the_block(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    program = serve_compare.Program([sys.executable, str(script)], "/ready")
    with serve_compare.started("it", program) as url, urllib.request.urlopen(f"{url}/ready", timeout=20) as response:
        assert response.status == 200
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/ready", timeout=20)


def test_a_program_that_ends_says_why() -> None:
    program = serve_compare.Program([sys.executable, "-c", "raise SystemExit('no such model')"], "/ready")
    with (
        pytest.raises(serve_compare.ServerError, match="it ended with status 1: no such model"),
        serve_compare.started("it", program),
    ):
        pytest.fail("it never was ready")
    with (
        pytest.raises(serve_compare.ServerError, match="cannot be started"),
        serve_compare.started("it", serve_compare.Program(["/no/such/program"], "/ready")),
    ):
        pytest.fail("it never was ready")


def test_started_servers_get_as_many_slots_as_requests_run() -> None:
    program = serve_compare.llama_program(
        Path("m.gguf"), executable="llama-server", threads=2, slots=8, slot_tokens=512, flags=["-b", "64"]
    )
    line = " ".join(program.command)
    assert "-np 8 -c 4096" in line
    assert line.endswith("-b 64")
    ours = serve_compare.paceline_program(Path("m.gguf"), threads=2, slots=8, flags=["--kv", "int8"])
    assert "--max-batch 8 --kv int8" in " ".join(ours.command)


def test_servers_get_the_same_prompts_and_each_round_has_others(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(counted_words) as first, scripted_server(counted_words) as second:
        servers = ["--server", f"a={first.url}", "--server", f"b={second.url}"]
        sizes = ["--concurrency", "1", "2", "--requests", "3", "--runs", "2", "--max-tokens", "2", "--threads", "1"]
        assert serve_compare.main([*servers, *sizes]) == 0

    def prompts(bodies: list[dict[str, Any]]) -> list[str]:
        """Of the load, without the probes of one token."""
        return [body["messages"][0]["content"] for body in bodies if body["max_tokens"] == 2]

    assert sorted(prompts(first.bodies)) == sorted(prompts(second.bodies))
    assert len(set(prompts(first.bodies))) == 2 * 3 * 3, "concurrencies, rounds with the warm-up, requests"
    assert all(body["ignore_eos"] for body in first.bodies)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document["results"]["2"]) == ["a", "b"]
    assert len(document["results"]["2"]["b"]["output_tokens_per_s"]["runs"]) == 2


def test_a_server_that_refuses_is_not_compared() -> None:
    async def sometimes(request: Any, body: dict[str, Any]) -> Any:
        if body["max_tokens"] > 1:  # no probe
            return await refused(429, {"error": {"message": "full"}})(request, body)
        return await counted_words(request, body)

    with scripted_server(sometimes) as server, pytest.raises(serve_compare.ServerError, match="http_429"):
        serve_compare.main(["--server", f"a={server.url}", "--concurrency", "1", "--requests", "1", "--runs", "1"])


def test_nothing_to_compare_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_compare.main([])
    assert "name a server" in capsys.readouterr().err
    with pytest.raises(ParameterError, match="runs"):
        serve_compare.main(["--server", "a=http://127.0.0.1:1", "--runs", "0"])
