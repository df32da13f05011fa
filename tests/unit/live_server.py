"""A real server over a byte LLM in this process: real sockets, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from paceline.llm import LLM
from paceline.serve.address import listen, url_of
from paceline.serve.keys import KeyRing
from paceline.serve.run import Server
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings

LIMIT_S = 30.0
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class LiveServer:
    """A server that runs; ``loop`` is its event loop, in a thread of its own."""

    url: str
    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> tuple[str, int]:
        """For raw sockets."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=LIMIT_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_S, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})

    def raw(self, data: bytes) -> bytes:
        """All that the server says to ``data`` until it closes."""
        with socket.create_connection(self.address, timeout=LIMIT_S) as connection:
            connection.sendall(data)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """What still comes."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def request_bytes(path: str, document: Any, *, close: bool = True, headers: str = "") -> bytes:
    """A POST as it goes over the wire."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head += headers + ("Connection: close\r\n" if close else "") + "\r\n"
    return head.encode() + body


@contextlib.contextmanager
def live_server(
    llm: LLM | None, settings: ServeSettings | None = None, keys: KeyRing | None = None
) -> Iterator[LiveServer]:
    """Serves ``llm``, or a model that still loads; ends the server and the LLM afterwards."""
    service = Service(settings or ServeSettings(), keys or KeyRing({}), model="bytes")
    server = Server(service)
    loop = asyncio.new_event_loop()
    is_up = threading.Event()

    async def run(listener: socket.socket) -> None:
        if llm is not None:
            service.use(llm)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        is_up.set()
        await serving

    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: loop.run_until_complete(run(listener)), daemon=True)
        thread.start()
        try:
            assert is_up.wait(LIMIT_S)
            yield LiveServer(url_of(listener), service, server, loop)
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            loop.close()
            if llm is not None:
                llm.close()


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true before the time is up."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return condition()


def is_idle(server: LiveServer) -> bool:
    """Whether nothing runs or waits, and no page is kept."""
    stats = server.service.llm.stats()
    return stats.num_running == stats.num_waiting == stats.pages_used == 0
