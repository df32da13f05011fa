"""What a drafter that reads the target's hidden states is told after each step of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.speculate.draft import Context, Draft


@dataclass(frozen=True)
class HiddenRows:
    """The hidden states of rows that a request kept: of its tokens ``position`` and those that follow.

    hidden [rows, hidden] f32: ``Executor.hidden`` of the target at these rows; valid until its next step
    """

    context: Context
    position: int
    hidden: NDArray[np.float32]

    @classmethod
    def kept(
        cls, context: Context, position: int, hidden: NDArray[np.float32], draft: Draft | None, tokens: Sequence[int]
    ) -> HiddenRows:
        """Of all rows that a request had in a step, from token ``position`` on, those that it kept: ``draft`` was
        verified there and gave ``tokens``."""
        return cls(context, position, hidden if draft is None else hidden[kept_rows(draft, tokens)])


@runtime_checkable
class HiddenObserver(Protocol):
    """A drafter that learns from hidden states."""

    def observe_hidden(self, step: Sequence[HiddenRows]) -> None:
        """The target has run a step and its tokens are in the requests: what it left of each. Changes no array and
        keeps none. Rows of tokens that come again, after a preemption, have the same bits."""
        ...


def kept_rows(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """Rows of ``draft``'s step that a request kept when it got ``tokens``, the last of which the target drew: row 0,
    and the node of each token but the last."""
    rows = [0]
    for token in tokens[:-1]:
        rows.append(next(row for row in draft.children(rows[-1]) if draft.tokens[row - 1] == token))
    return rows
