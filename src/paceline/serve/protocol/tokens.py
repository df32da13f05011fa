"""Tokenising on the wire. Source: vLLM's API of the same names."""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictInt, model_validator

from paceline.serve.protocol.chat import ChatMessage
from paceline.serve.protocol.tools import Tool
from paceline.serve.protocol.wire import WireAnswer, WireModel


class TokenizeRequest(WireModel):
    """Either ``prompt`` or ``messages``. ``add_special_tokens`` is for the first (true unless given) alone: a chat
    template has put them where they belong. What goes with messages means what it does in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeResponse(WireAnswer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: list[StrictInt]


class DetokenizeResponse(WireAnswer):
    prompt: str = Field(description="special tokens are spelled out")


class TokenizerInfo(WireAnswer):
    """Null where the model has no such token or template."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None
