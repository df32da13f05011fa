"""Clients of completions and of TGI endpoints that leave: their work ends, whatever form it has, and leaks nothing."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from byte_llm import byte_llm
from live_server import LIMIT_S, eventually, is_idle, live_server, request_bytes

LONG = 3000
GREEDY = {"max_tokens": LONG, "temperature": 0}
TGI = {"inputs": "x", "parameters": {"max_new_tokens": LONG}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", **GREEDY}),
        ("/v1/completions", {"prompt": "x", **GREEDY, "stream": True}),
        ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 2, **GREEDY}),
        ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 2, **GREEDY, "stream": True}),
        ("/v1/completions", {"prompt": ["x", "y"], **GREEDY, "stream": True, "echo": True, "logprobs": 1}),
        ("/generate", TGI),
        ("/generate_stream", TGI),
        ("/", {**TGI, "stream": True}),
    ],
    ids=str,
)
def test_work_ends_with_its_client(path: str, body: dict[str, Any]) -> None:
    with live_server(byte_llm(text="hello")) as server:
        with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
            connection.sendall(request_bytes(path, body))
            assert eventually(lambda: server.service.llm.stats().output_tokens > 3)
        assert eventually(lambda: is_idle(server))
        assert server.service.llm.stats().output_tokens < LONG, "it was not cut short"
        assert eventually(lambda: not server.server.server_state.tasks)
        assert server.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
