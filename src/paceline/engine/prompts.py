"""What a caller may give as a prompt or as a list of prompts, and the shape of what comes back for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from paceline.engine.outputs import Completion
from paceline.engine.request import Request

Prompt = str | Sequence[int]
"""Text, or token ids."""


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
