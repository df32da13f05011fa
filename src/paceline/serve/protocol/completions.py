"""Plain completions on the wire. Source: OpenAI's API reference, "Completions"."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictInt

from paceline.serve.protocol.base import SamplingFields, Timings, Usage
from paceline.serve.protocol.wire import WireAnswer

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """``add_special_tokens`` is vLLM's: whether a prompt that is text gets what the model wants around a whole text."""

    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    max_tokens: int | None = Field(default=DEFAULT_MAX_TOKENS, ge=0, description="0 is possible with echo")
    echo: bool = Field(default=False, description="the text, and its log-probabilities, begin with the prompt")
    logprobs: StrictInt | None = None
    suffix: str | None = Field(default=None, description="refused: no model here fills a gap")
    best_of: int | None = Field(default=None, description="refused unless it is n")
    add_special_tokens: bool = True


class CompletionLogprobs(WireAnswer):
    """Arrays with an entry for each token. A token that is no text of its own is spelled ``bytes:\\xNN...``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="the character of the text with which a token begins")


class CompletionChoice(WireAnswer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(WireAnswer):
    """The choices of prompt ``i`` have the indices from ``i * n`` on."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings | None = None


class CompletionChunkChoice(CompletionChoice):
    """``drafted`` (ours, with ``stream_options.include_drafted``): the text in pieces that were drafted or not."""

    drafted: list[tuple[str, bool]] | None = None


class CompletionChunk(WireAnswer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
