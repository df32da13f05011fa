"""The server as a process: the address it prints, ports, signals, exit statuses."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

READY = re.compile(r"Paceline serves (\S+) at (http://127\.0\.0\.1:\d+) \(ready in \d+\.\d s\)")
LIMIT_S = 60
STORY = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 200,
    "temperature": 0,
    "stream": True,
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers with the given arguments; none outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def starting(*arguments: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--log-format", "off", *arguments]
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


def test_sigterm_finishes_what_runs_and_leaves_with_0(start: Start) -> None:
    process = start()
    url = wait_until_ready(process)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=STORY, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert ended(process) == (0, "")


def test_sigterm_ends_what_takes_too_long_with_an_error_and_0(start: Start) -> None:
    process = start("--shutdown-s", "0.1")
    url = wait_until_ready(process)
    endless = {**STORY, "max_tokens": 8000, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=endless, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "event: error" in rest
    assert "server_stopping" in rest[-2]
    assert ended(process) == (0, "")


def test_a_second_signal_ends_at_once(start: Start) -> None:
    process = start("--shutdown-s", "600")
    url = wait_until_ready(process)
    endless = {**STORY, "max_tokens": 8000, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=endless, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        for line in lines:  # it still answers, which shows that the first signal alone does not end it
            if "content" in line:
                break
        process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.TransportError):
            list(lines)
    assert ended(process)[0] == 0


def test_sigterm_while_loading_leaves_with_0(start: Start) -> None:
    process = start("--port", str(free_port := _free_port()))
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{free_port}/health/ready").status_code == 503:
                break
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "")


def test_a_model_that_does_not_exist_is_one_line(start: Start) -> None:
    status, errors = ended(start("no-such-model"))
    assert status == 1
    assert errors.startswith("paceline: error: ")
    assert errors.count("\n") == 1


def test_a_configuration_file_says_what_flags_do_not(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(
        'model = "smollm2-135m"\n[server]\nserved_name = "small"\nmax_choices = 2\n[engine]\nmax_batch = 2\n'
    )
    url = wait_until_ready(start("--config", str(file), "--served-name", "mine"))
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
