"""`/v1/embeddings`: mean-pooled hidden states of a generative model, and called so."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from starlette.requests import Request

from paceline.engine.outputs import Completion
from paceline.engine.pooling import EMBEDDING_PARAMS, Embedding, embedding_of
from paceline.serve.answers import Answer, DocumentAnswer, until_disconnected
from paceline.serve.bridge import AnswerStream
from paceline.serve.errors import HTTPError
from paceline.serve.limits import check_tokens
from paceline.serve.outcomes import check_outcomes
from paceline.serve.protocol.embeddings import EmbeddingItem, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from paceline.serve.service import Exchange, Service


async def create_embeddings(service: Service, exchange: Exchange, http: Request, body: EmbeddingRequest) -> Answer:
    """A vector for each input, all computed in the batch of everything else."""
    service.check_model(body.model)
    if body.dimensions is not None:
        raise HTTPError(
            400,
            f"dimensions={body.dimensions} is not possible: the vectors have the width of the model and cannot be cut",
            param="dimensions",
            code="invalid_value",
        )
    prompts = await _prompts(service, body)
    with ExitStack() as open_streams:
        streams: list[AnswerStream] = []
        for prompt in prompts:
            stream = await service.ask(exchange, prompt, EMBEDDING_PARAMS, field="input", streaming=False, embed=True)
            open_streams.callback(stream.close)
            streams.append(stream)
        completions = await until_disconnected(http, _completions(streams))
    check_outcomes(completions)
    embeddings = [embedding_of(completion, normalize=body.normalize) for completion in completions]
    num_tokens = sum(embedding.num_tokens for embedding in embeddings)
    answer = EmbeddingResponse(
        data=[
            EmbeddingItem(index=index, embedding=_encoded(embedding, body.encoding_format))
            for index, embedding in enumerate(embeddings)
        ],
        model=service.model,
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )
    return DocumentAnswer(answer.model_dump())


async def _completions(streams: Sequence[AnswerStream]) -> list[Completion]:
    return [(await stream.completions())[0] for stream in streams]


async def _prompts(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    """The inputs as tokens."""
    given: Any = body.input
    each = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(each) <= service.settings.max_prompts:
        raise HTTPError(
            400,
            f"{len(each)} inputs in one request and this server takes between 1 and {service.settings.max_prompts}",
            param="input",
            code="invalid_value",
        )
    prompts = [await service.encode(one) if isinstance(one, str) else one for one in each]
    if not all(prompts):
        raise HTTPError(400, "an input is empty: at least one token each", param="input", code="invalid_value")
    for prompt in prompts:
        check_tokens(service.llm, prompt, "input")
    return prompts


def _encoded(embedding: Embedding, encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(embedding.vector.astype("<f4").tobytes()).decode()
    vector: list[float] = np.asarray(embedding.vector, np.float64).tolist()
    return vector
