"""An application over a fake model, asked in the test's own process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from byte_llm import byte_llm

from paceline.llm import LLM
from paceline.serve.app import build_app
from paceline.serve.keys import KeyRing
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings

MODEL = "tiny"


@contextlib.asynccontextmanager
async def served(
    llm: LLM | None = None, settings: ServeSettings | None = None, *, text: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that serves ``llm`` (a byte LLM that says ``text``, or noise, unless given)."""
    service = Service(settings or ServeSettings(), KeyRing({}), model=MODEL)
    with llm or byte_llm(text=text) as model:
        service.use(model)
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            yield client


def events_of(text: str) -> list[Any]:
    """What the events of a stream carry; the text "[DONE]" as it is."""
    found = []
    for block in text.split("\n\n"):
        data = [line.removeprefix("data:").strip() for line in block.splitlines() if line.startswith("data:")]
        found += [line if line == "[DONE]" else json.loads(line) for line in data]
    return found
