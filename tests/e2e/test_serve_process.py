"""The server as a process: the address it prints, ports, signals, exit statuses."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

READY = re.compile(r"Paceline serves (\S+) at (http://127\.0\.0\.1:\d+) \(ready in \d+\.\d s\)")
LIMIT_S = 60

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers with the given arguments; none outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def starting(*arguments: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "paceline", "serve", "--port", "0", *arguments]
        started.append(subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield starting
    for process in started:
        process.kill()
        process.communicate()


def wait_until_ready(process: subprocess.Popen[str]) -> str:
    """The address that the server prints once the model is there."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := READY.match(line):
            return found[2]
    raise AssertionError(f"the server ended with {process.wait()} and never said where it is")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status and what was left on standard error."""
    _, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, errors


def chat(url: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Tell me about rivers."}]
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, **fields}, timeout=LIMIT_S)


def test_prints_the_address_that_port_0_became_when_it_can_answer(start: Start) -> None:
    url = wait_until_ready(start())
    answer = chat(url, max_tokens=3, temperature=0)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_port_in_use_is_one_line_and_no_model_is_loaded_for_it(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, errors = ended(start("--port", str(port)))
    assert status == 1
    assert errors == f"paceline: error: cannot listen at 127.0.0.1, port {port}: Address already in use\n"
