"""The table of endpoints: what the router serves and what the OpenAPI document says are both made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request

from paceline.serve import chat, completions, embeddings, health, metrics, models, statistics, tgi, tokens
from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.errors import Problem
from paceline.serve.page.handler import show_page
from paceline.serve.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from paceline.serve.protocol.completions import CompletionChunk, CompletionRequest, CompletionResponse
from paceline.serve.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from paceline.serve.protocol.models import Health, ModelCard, ModelList, Readiness
from paceline.serve.protocol.statistics import Statistics
from paceline.serve.protocol.tgi import (
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    GenerateResponses,
    Info,
    StreamResponse,
)
from paceline.serve.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from paceline.serve.service import Exchange, Service

Handler = Callable[[Service, Exchange, Request, Any], Awaitable[Answer]]


def openai_problem(problem: Problem) -> DocumentAnswer:
    """An error in the form that OpenAI's clients read."""
    return DocumentAnswer(problem.document(), problem.status, problem.headers)


@dataclass(frozen=True)
class Endpoint:
    """One path and method.

    body    what the request carries, parsed and handed to the handler; None without
    answer  what a 200 carries;  chunk  one event of it as a stream, None where it never streams
    is_open whether it needs no key
    problem what an error looks like here
    media_type      of a 200 that is no JSON
    other_statuses  that carry the same as a 200
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    is_open: bool = False
    problem: Callable[[Problem], DocumentAnswer] = openai_problem
    media_type: str | None = None
    other_statuses: tuple[int, ...] = ()


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/", show_page, is_open=True, media_type="text/html"),
    Endpoint("POST", "/v1/chat/completions", chat.create_chat_completion, ChatRequest, ChatResponse, ChatChunk),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.create_completion,
        CompletionRequest,
        CompletionResponse,
        CompletionChunk,
    ),
    Endpoint("POST", "/v1/embeddings", embeddings.create_embeddings, EmbeddingRequest, EmbeddingResponse),
    Endpoint("GET", "/v1/models", models.list_models, answer=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", models.retrieve_model, answer=ModelCard),
    Endpoint("POST", "/tokenize", tokens.tokenize, TokenizeRequest, TokenizeResponse),
    Endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeRequest, DetokenizeResponse),
    Endpoint("GET", "/tokenizer_info", tokens.tokenizer_info, answer=TokenizerInfo),
    Endpoint("POST", "/generate", tgi.generate, GenerateRequest, GenerateResponse, problem=tgi.tgi_problem),
    Endpoint(
        "POST",
        "/generate_stream",
        tgi.generate_stream,
        GenerateRequest,
        None,
        StreamResponse,
        problem=tgi.tgi_problem,
    ),
    Endpoint(
        "POST",
        "/",
        tgi.compat_generate,
        CompatGenerateRequest,
        GenerateResponses,
        StreamResponse,
        problem=tgi.tgi_problem,
    ),
    Endpoint("GET", "/info", tgi.info, answer=Info, problem=tgi.tgi_problem),
    Endpoint("GET", "/metrics", metrics.metrics, media_type="text/plain"),
    Endpoint("GET", "/stats", statistics.statistics, answer=Statistics),
    Endpoint("GET", "/health", tgi.health, is_open=True, problem=tgi.tgi_problem, other_statuses=(503,)),
    Endpoint("GET", "/health/live", health.live, answer=Health, is_open=True),
    Endpoint("GET", "/health/ready", health.ready, answer=Readiness, is_open=True, other_statuses=(503,)),
)
