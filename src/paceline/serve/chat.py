"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from paceline import __version__
from paceline.engine.outputs import Completion, Delta
from paceline.serve.answers import Answer, DocumentAnswer, EventAnswer, until_disconnected
from paceline.serve.bridge import AnswerStream
from paceline.serve.errors import problem_of
from paceline.serve.protocol.chat import ChatRequest
from paceline.serve.service import Exchange, Service
from paceline.serve.sse import DONE, PING, event
from paceline.serve.usage import timings_document, usage_document

FINGERPRINT = f"paceline-{__version__}"


async def create_chat_completion(service: Service, exchange: Exchange, http: Request, body: ChatRequest) -> Answer:
    """The assistant's next message, whole or as a stream of chunks."""
    service.check_model(body.model)
    params = body.sampling_params(
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    )
    messages = [{"role": message.role, "content": message.text()} for message in body.messages]
    prompt = service.llm.chat_tokens(messages)
    stream = await service.ask(exchange, prompt, params, streaming=body.stream)
    head = {
        "id": f"chatcmpl-{exchange.request_id}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": service.model,
        "system_fingerprint": FINGERPRINT,
    }
    if body.stream:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventAnswer(_chunks(stream, head, params.n, include_usage, service.settings.ping_s))
    try:
        completions = await until_disconnected(http, stream.completions())
    finally:
        stream.close()
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }
        for index, completion in enumerate(completions)
    ]
    return DocumentAnswer(
        {**head, "choices": choices, "usage": usage_document(completions), "timings": timings_document(completions[0])}
    )


async def _chunks(
    stream: AnswerStream, head: dict[str, Any], num_choices: int, include_usage: bool, ping_s: float
) -> AsyncIterator[bytes]:
    """The chunks of a stream as bytes: the role, texts, reasons, perhaps usage, and the end."""
    start = json.dumps(head, ensure_ascii=False, separators=(",", ":"))[:-1]
    usage = ',"usage":null' if include_usage else ""

    def chunk(index: int, delta: str, reason: str = "null") -> bytes:
        return (
            f'data: {start},"choices":[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{reason}}}]'
            f"{usage}}}\n\n"
        ).encode()

    try:
        for index in range(num_choices):
            yield chunk(index, '{"role":"assistant","content":""}')
        ended: dict[int, Completion] = {}
        while stream.is_open:
            deltas = await stream.next(ping_s)
            if not deltas:
                yield PING
            for delta in deltas:
                if delta.text:
                    yield chunk(delta.index, '{"content":' + json.dumps(delta.text, ensure_ascii=False) + "}")
                if delta.completion is not None:
                    ended[delta.index] = delta.completion
                    if delta.completion.error is not None:
                        yield event(problem_of(delta.completion.error).document(), "error")
                        return
                    yield chunk(delta.index, "{}", json.dumps(_reason(delta)))
        if include_usage:
            completions = [ended[index] for index in sorted(ended)]
            document = {**head, "choices": [], "usage": usage_document(completions)}
            yield event({**document, "timings": timings_document(completions[0])})
        yield DONE
    finally:
        stream.close()


def _reason(delta: Delta) -> str:
    return delta.finish_reason or "stop"
