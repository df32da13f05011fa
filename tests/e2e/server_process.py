"""A real server in a process of its own, for tests that talk to it over HTTP."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MODEL = "smollm2-135m"
START_S = 120
STOP_S = 60
READY = re.compile(r"^Paceline serves .* at (http://\S+)", re.MULTILINE)


@dataclass(frozen=True)
class ServerProcess:
    """``url`` has neither path nor final slash; ``log`` is what the server writes to stderr."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def v1(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"


@contextlib.contextmanager
def running_server(*arguments: str, model: str = MODEL) -> Iterator[ServerProcess]:
    """A server at a free port while the block lasts; it must then end by itself, with status 0, on SIGTERM."""
    command = [sys.executable, "-m", "paceline", "serve", model, "--port", "0", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "stderr")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        is_ready = threading.Event()
        reader = threading.Thread(target=_copy, args=(process.stderr, log, is_ready), daemon=True)
        reader.start()
        try:
            is_ready.wait(START_S)
            found = READY.search(log.read_text("utf-8"))
            assert found is not None, f"no server after {START_S} s:\n{log.read_text('utf-8')}"
            yield ServerProcess(found[1], model, process, log)
            if process.poll() is None:
                process.terminate()
            status = process.wait(STOP_S)
            assert status == 0, f"the server ended with status {status}:\n{log.read_text('utf-8')}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            reader.join()
            process.stderr.close()


def _copy(source: IO[bytes], log: Path, is_ready: threading.Event) -> None:
    """Writes what the server says into the log; ready when it has said where it is, or has ended."""
    with log.open("wb", buffering=0) as target:
        for line in source:
            target.write(line)
            if READY.match(line.decode("utf-8", "replace")):
                is_ready.set()
    is_ready.set()
