"""`paceline bench serve` as a process against `paceline serve` as a process, with a real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

LIMIT_S = 120


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server."""
    line = [sys.executable, "-m", "paceline", "serve", "--port", "0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", said) for said in process.stderr)))
        yield found[0]
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def bench(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "bench", "serve", "--url", url, *flags]


@pytest.mark.parametrize("load", [("--concurrency", "2"), ("--rate", "50")])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_every_request_has_its_tokens(url: str, load: tuple[str, ...], api: str) -> None:
    sizes = ("--requests", "4", "--prompt-tokens", "64", "--max-tokens", "5", "--ignore-eos", "--api", api)
    done = subprocess.run(bench(url, *load, *sizes, "--json"), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["requests"] == {"sent": 4, "succeeded": 4, "failed": 0, "unfinished": 0}
    assert shown["tokens"]["output"] == 20
    assert shown["tokens"]["counted_by_usage"] == 4
    # Every word is a token of this vocabulary, so a prompt misses by what rounding leaves.
    assert shown["tokens"]["prompt"] == pytest.approx(4 * 64, abs=4)
    assert shown["latency_ms"]["ttft"]["p50"] <= shown["latency_ms"]["e2e"]["p50"]


def test_an_unknown_model_is_one_line(url: str) -> None:
    line = bench(url, "--model", "nobody", "--concurrency", "1")
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "http_404" in done.stderr
    assert done.stderr.count("\n") == 1
