"""The end of compare.py that talks to an engine's process: a worker that stays, or a fresh process for each start."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any


class EngineError(Exception):
    """An engine could not load or answer; the text is its own."""


class Worker:
    """One engine's process."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env
        )
        hello = self._receive()
        self.version: str = hello["version"]
        self.path: dict[str, Any] = hello["path"]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result of a job; EngineError when there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(self._last_words()) from None
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            reason = self._last_words()
            self.close()
            raise EngineError(reason)
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise EngineError(result["error"])
        return result

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'no message'}"


def measure_start(command: Sequence[str], env: dict[str, str], job: dict[str, Any]) -> tuple[float, int | None]:
    """Seconds from the start of a fresh process to its first piece of output, and its largest resident memory."""
    with tempfile.TemporaryFile() as errors:
        started_s = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env)
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
            first = os.read(process.stdout.fileno(), 1)
            first_s = time.perf_counter() - started_s
            rest = process.stdout.read()
        errors.seek(0)
        if process.returncode != 0 or not first:
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise EngineError(f"ended with status {process.returncode}: {lines[-1] if lines else 'no message'}")
    return first_s, json.loads(rest.decode().strip().splitlines()[-1])["peak_bytes"]
