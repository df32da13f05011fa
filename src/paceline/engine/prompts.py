"""What a caller may give as a prompt or as a list of prompts, what turns it into tokens, and the shape of what comes
back for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.engine.detokenize import TokenText
from paceline.engine.outputs import Completion
from paceline.engine.request import Request

Prompt = str | Sequence[int]
"""Text, or token ids."""

Messages = Sequence[Mapping[str, Any]]
"""Each with "role" and "content", and what else a template reads."""


class PromptTokenizer(TokenText, Protocol):
    """What an LLM needs of a tokenizer."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int, include_special: bool = False) -> bytes:
        """As ``TokenText`` has it; with ``include_special`` control tokens are spelled out."""
        ...


class Template(Protocol):
    """What an LLM needs of a chat template."""

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...


def is_list_like(value: object) -> bool:
    """Text, a sequence or an array; not bytes, whose items would pass for token ids, nor a mapping."""
    return (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, (bytes, bytearray, Mapping))
    )


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: text, or token ids. An empty list is a list of no prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))


def answers_of(
    completions: list[Completion], groups: list[list[Request]], *, single: bool
) -> Completion | list[Completion]:
    """Completions by prompt; the error of a single one is raised."""
    left = iter(completions)
    answers: list[Completion] = []
    for group in groups:
        choices = tuple(next(left) for _ in group)
        answers.append(choices[0] if len(choices) == 1 else dataclasses.replace(choices[0], choices=choices))
    if not single:
        return answers
    for choice in answers[0].choices or answers:
        if choice.error is not None:
            raise choice.error
    return answers[0]
