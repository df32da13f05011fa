"""Embeddings on the wire. Source: OpenAI's API reference, "Embeddings"."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictInt

from paceline.serve.protocol.wire import WireAnswer, WireModel


class EmbeddingRequest(WireModel):
    """``input`` is a text, a list of texts, token ids, or a list of lists of token ids. ``normalize`` (ours) has
    vectors of length 1. ``dimensions`` is refused: the vectors of these models cannot be cut."""

    model: str | None = None
    input: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = False
    user: str | None = Field(default=None, description="taken and not used")


class EmbeddingItem(WireAnswer):
    """``embedding``: numbers, or in base64 their bytes as little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(WireAnswer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(WireAnswer):
    """``pooling`` (ours) says what the vectors are."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    pooling: Literal["mean-pooled hidden states"] = "mean-pooled hidden states"
    usage: EmbeddingUsage
