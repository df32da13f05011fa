"""What must not break a real server: crowds, clients that die or never read, bodies that are none."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from server_process import MODEL, ServerProcess, running_server

from paceline.weights.catalog import resolve_model

NUM_CLIENTS = 200
GROWTH_MB = 100
"""What keys and values of 200 answers, and Python's own caches, may leave in memory."""


@pytest.fixture(scope="module")
def crowded() -> Iterator[ServerProcess]:
    """A server of its own, whose books must be balanced at the end."""
    resolve_model(MODEL)
    with running_server("--max-queue", "512", "--kv-memory", "64M", "--log-format", "off") as started:
        yield started


def body(num_tokens: int, **fields: Any) -> bytes:
    """A streamed chat of exactly so many tokens."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    request = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return json.dumps({**request, **fields}).encode()


class Client:
    """One connection, bytes in and bytes out."""

    def __init__(self, server: ServerProcess) -> None:
        self._address = urlsplit(server.url)

    async def open(self, content: bytes, length: int | None = None) -> None:
        """Sends a chat request."""
        self.reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content) if length is None else length}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        await self._writer.drain()

    async def ask(self, content: bytes, length: int | None = None) -> bytes:
        """The whole answer."""
        await self.open(content, length)
        answer = await self.reader.read()
        self.close()
        return answer

    def close(self) -> None:
        """Leaves."""
        self._writer.close()


def books(server: ServerProcess) -> tuple[int, int, int, float]:
    """Requests running and waiting, open files, and the share of pages that requests hold."""
    state = httpx.get(f"{server.url}/stats").json()
    return (
        state["running"],
        state["waiting"],
        len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())),
        state["kv_use"],
    )


def resident_mb(server: ServerProcess) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


async def until_idle(server: ServerProcess, num_files: int) -> None:
    """Returns when the server holds nothing of anybody; the test's own limit ends a wait that never does."""
    while await asyncio.to_thread(books, server) > (0, 0, num_files, 0.0):
        await asyncio.sleep(0.05)


def test_crowds_and_clients_that_die_leave_nothing_behind(crowded: ServerProcess) -> None:
    async def scenario() -> None:
        assert b"[DONE]" in await Client(crowded).ask(body(4))
        num_files = books(crowded)[2]
        answers = await asyncio.gather(*[Client(crowded).ask(body(8)) for _ in range(NUM_CLIENTS)])
        assert sum(b"[DONE]" in answer for answer in answers) == NUM_CLIENTS
        await until_idle(crowded, num_files)
        before_mb = resident_mb(crowded)

        idle_reader = Client(crowded)  # takes nothing of a long answer
        await idle_reader.open(body(2000))
        assert b"[DONE]" in await Client(crowded).ask(body(16)), "nobody waits for one who does not read"
        idle_reader.close()
        curl = shutil.which("curl")
        if curl is not None:
            await asyncio.to_thread(_killed_while_it_reads, curl, crowded)
        await until_idle(crowded, num_files)
        assert resident_mb(crowded) - before_mb < GROWTH_MB

    asyncio.run(scenario())


def _killed_while_it_reads(curl: str, server: ServerProcess) -> None:
    command = [curl, "-sN", "-H", "Content-Type: application/json", "-d", body(8000).decode()]
    with subprocess.Popen([*command, f"{server.url}/v1/chat/completions"], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.read(300)
        client.kill()


BAD = {
    "no end": b"{",
    "a list": b"[]",
    "null": b"null",
    "no list of messages": b'{"messages": 1}',
    "no UTF-8": b"\xff\xfe",
    "not a number": b'{"messages": [], "temperature": NaN}',
    "deep": b"[" * 100_000,
    "infinite": body(5, temperature=0.5).replace(b"0.5", b"1e400"),
    "a schema of no type": body(
        5, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    ),
    "half an expression": body(5, guided_regex="(("),
    "too many choices": body(5, n=10**9),
    "a bias for no token": body(5, logit_bias={"a": 1}),
    "a negative seed": body(5, seed=-1),
}


def test_bad_bodies_are_400_while_others_stream(crowded: ServerProcess) -> None:
    async def scenario() -> None:
        other = asyncio.ensure_future(Client(crowded).ask(body(200)))
        for name, content in BAD.items():
            answer = await Client(crowded).ask(content)
            assert answer.startswith(b"HTTP/1.1 400 "), (name, answer[:200])
        too_long = await Client(crowded).ask(b"x" * 1000, length=10**9)
        assert too_long.startswith(b"HTTP/1.1 413 ")
        assert b"[DONE]" in await other

    asyncio.run(scenario())
