"""Requests as a drafter sees them, and what every draft must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.params import SamplingParams
from paceline.sampling.constraint import Constraint
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import greedy_rows
from paceline.speculate.draft import Context, Draft


@dataclass
class FakeContext:
    """A request of known tokens that penalises nothing."""

    tokens: list[int]
    num_prompt: int = 0
    max_tokens: int = 1 << 20
    domain: bytes = b""
    request_id: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    record: NDArray[np.void] = field(default_factory=lambda: greedy_rows(1).rows)
    slot: int | None = None
    constraint: Constraint | None = None

    def add_lists(self, lists: ListsBuilder, output: int, path: Sequence[int]) -> None:
        """Nothing to add."""


def check_draft(draft: Draft | None, context: Context, limit: int, seen: set[int]) -> None:
    """Raises AssertionError unless the draft is one for the request: within both limits, of tokens that were ``seen``,
    siblings apart and not surer together than certainty."""
    if draft is None:
        return
    assert 1 <= len(draft) <= limit, "empty or beyond the limit"
    assert set(draft.tokens) <= seen, "a token that nobody wrote"
    assert all(0 < confidence <= 1 for confidence in draft.confidence), "confidence out of range"
    for row in range(len(draft) + 1):
        assert len(context.tokens) + len(draft.path(row)) < context.max_tokens, "beyond the request's end"
        nodes = [child - 1 for child in draft.children(row)]
        assert len({draft.tokens[node] for node in nodes}) == len(nodes), "siblings are equal"
        assert sum(draft.confidence[node] for node in nodes) <= 1 + 1e-9, "siblings exceed certainty"


def ids_of(text: str) -> list[int]:
    """A letter a token."""
    return [ord(letter) for letter in text]


def text_of(draft: Draft | None) -> str:
    """The tokens of a draft as letters; empty for none."""
    return "" if draft is None else "".join(map(chr, draft.tokens))
