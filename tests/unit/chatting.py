"""Chats with an application over a byte LLM: an answer, the chunks of one, an error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from served import events_of, served

from paceline.llm import LLM
from paceline.serve.protocol.chat import ChatChunk, ChatResponse
from paceline.serve.settings import ServeSettings

USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(
    text: str | None = None,
    *,
    messages: Any = USER,
    llm: LLM | None = None,
    settings: ServeSettings | None = None,
    **fields: Any,
) -> httpx.Response:
    """The response to one request of a server that always says ``text``."""

    async def asking() -> httpx.Response:
        async with served(llm, settings, text=text) as client:
            return await client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    return asyncio.run(asking())


def answer(text: str | None = None, **fields: Any) -> dict[str, Any]:
    """The document of an answer, which must be what the protocol says."""
    response = ask(text, **fields)
    assert response.status_code == 200, response.text
    ChatResponse.model_validate(response.json(), strict=False)
    document: dict[str, Any] = response.json()
    return document


def chunks(text: str | None = None, **fields: Any) -> list[Any]:
    """The chunks of a stream, which must be what the protocol says, without the end mark, which must be there."""
    response = ask(text, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, end = events_of(response.text)
    assert end == "[DONE]"
    for chunk in found:
        ChatChunk.model_validate(chunk)
    return found


def refusal(**fields: Any) -> dict[str, Any]:
    """The error of a request that is refused with 400."""
    response = ask(**fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def prompt_of(llm_chat: Mapping[str, Any]) -> int:
    """Tokens of a prompt: its bytes here."""
    tokens: int = llm_chat["usage"]["prompt_tokens"]
    return tokens


def joined(found: Sequence[Any], index: int = 0) -> str:
    """The content of a choice."""
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in found
        for choice in chunk["choices"]
        if choice["index"] == index
    )
