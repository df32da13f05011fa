"""`/v1/chat/completions`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any

from starlette.requests import Request

from paceline.engine.outputs import Completion
from paceline.errors import ParameterError
from paceline.params import SamplingParams
from paceline.serve.answers import Answer, DocumentAnswer, EventAnswer, until_disconnected
from paceline.serve.chat_choice import ChatChoice, message_document
from paceline.serve.chat_stream import ChunkWriter, chat_events
from paceline.serve.conversation import read_conversation
from paceline.serve.events import AnswerEvents
from paceline.serve.head import head_of
from paceline.serve.limits import check_limits
from paceline.serve.outcomes import check_outcomes
from paceline.serve.protocol.chat import ChatRequest
from paceline.serve.service import Exchange, Service
from paceline.serve.tools.toolbox import Toolbox
from paceline.serve.usage import timings_document, usage_document

_POSITION = re.compile(r"^at \d+\(\d+\): ")
"""Where in a grammar of ours a schema of the client's stands: nothing to tell."""


async def create_chat_completion(service: Service, exchange: Exchange, http: Request, body: ChatRequest) -> Answer:
    """The assistant's next message, whole or as a stream of chunks."""
    service.check_model(body.model)
    text, toolbox = read_conversation(body, service.llm.chat_template)
    params = _params(body, toolbox)
    check_limits(service.settings, params, logprobs_field="top_logprobs")
    prompt = await service.encode(text, add_special_tokens=False)
    try:
        stream = await service.ask(exchange, prompt, params, field="messages", streaming=body.stream)
    except ParameterError as error:
        if toolbox is None or error.field != "tools":
            raise
        names = shorten(", ".join(toolbox.names), 80, placeholder=" ...")
        raise ParameterError("tools", names, _POSITION.sub("", error.allowed).partition("\n")[0]) from error
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = head_of(exchange, service.model, "chatcmpl", kind)
    choices = [ChatChoice(toolbox, has_logprobs=params.logprobs is not None) for _ in range(params.n)]
    if body.stream:
        writer = ChunkWriter(head, choices, body.stream_options)
        return EventAnswer(AnswerEvents(chat_events(stream, writer, service.settings.ping_s), [stream]))
    try:
        completions = await until_disconnected(http, stream.completions())
    finally:
        stream.close()
    check_outcomes(completions)
    return DocumentAnswer(_document(head, choices, completions))


def _params(body: ChatRequest, toolbox: Toolbox | None) -> SamplingParams:
    """What the engine is asked for. Raises ``ParameterError``."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, max_tokens):
        raise ParameterError(
            "max_tokens", body.max_tokens, f"the same as max_completion_tokens ({max_tokens}), or none"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ParameterError("top_logprobs", body.top_logprobs, "only together with logprobs: true")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise ParameterError("top_logprobs", body.top_logprobs, "a whole number of at least 0")
    fields: dict[str, Any] = {"max_tokens": max_tokens}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    params = body.sampling_params(**fields)
    if toolbox is None:
        return params
    if params.structure is not None:
        raise ParameterError("tools", "given", "none (or tool_choice none) where the answer has a structure to keep to")
    return replace(params, structure=toolbox.structure())


def _document(head: dict[str, Any], choices: Sequence[ChatChoice], completions: Sequence[Completion]) -> dict[str, Any]:
    """The whole answer."""
    documents = []
    for index, (choice, completion) in enumerate(zip(choices, completions, strict=True)):
        pieces = choice.read(completion.text, completion.logprobs, completion)
        documents.append(
            {
                "index": index,
                "message": message_document(pieces),
                "logprobs": choice.take_logprobs(),
                "finish_reason": choice.finish_reason(completion),
            }
        )
    usage, timings = usage_document(completions), timings_document(completions[0])
    return {**head, "choices": documents, "usage": usage, "timings": timings}
