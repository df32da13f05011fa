"""Chat completions on the wire. Source: OpenAI's API reference, "Chat completions"; extensions as vLLM names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.serve.protocol.base import SamplingFields, Timings, Usage
from paceline.serve.protocol.tools import Tool, ToolCall, ToolCallDelta, ToolChoice
from paceline.serve.protocol.wire import WireAnswer, WireModel

NOT_USED = "taken and not used"


class TextPart(WireModel):
    type: Literal["text"]
    text: str


class ChatMessage(WireModel):
    """What an answer had may be sent back as it came: its empty fields are taken."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = Field(default=None, description=NOT_USED)
    annotations: list[Any] | None = Field(default=None, description=NOT_USED)
    audio: None = None
    function_call: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _has_text_alone(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(
                    f"parts of type {kind!r} are not supported: the model reads text, parts of type 'text'"
                )
        return content

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(SamplingFields):
    """Fields that are not listed are refused. ``max_tokens`` is the older name of ``max_completion_tokens``; without
    either an answer may go on to the end of the context."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = Field(
        default=None, description="whether the template opens an assistant message; true unless one is continued"
    )
    continue_final_message: bool = Field(
        default=False, description="the last message is the assistant's, and the answer continues it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="more variables for the template")
    modalities: list[Literal["text"]] | None = None
    store: bool | None = Field(default=None, description=NOT_USED)
    service_tier: str | None = Field(default=None, description=NOT_USED)
    safety_identifier: str | None = Field(default=None, description=NOT_USED)
    prompt_cache_key: str | None = Field(default=None, description=NOT_USED + ": the cache domain follows from the key")


class AssistantMessage(WireAnswer):
    """``content`` is null when there are calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Alternative(WireAnswer):
    """``bytes`` are what the token stands for; ``token`` shows U+FFFD where they are no whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobDocument(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(WireAnswer):
    """Tokens stand with the text that they end in; with tools, of all that the model wrote, calls included."""

    content: list[TokenLogprobDocument]
    refusal: None = None


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(WireAnswer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason


class ChatResponse(WireAnswer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | None = None


class ChatDelta(WireAnswer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(WireAnswer):
    """``drafted`` (ours, with ``stream_options.include_drafted``): the text the model wrote since the chunk before, cut
    into pieces that speculation drafted or not."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    drafted: list[tuple[str, bool]] | None = None


class ChatChunk(WireAnswer):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
