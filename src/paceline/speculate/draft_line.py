"""A request while a model runs ahead of it: what is known, drafted, computed and scheduled; a step of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.executors.base import StepPlan
from paceline.sampling.rows import SampleRows
from paceline.speculate.draft import Context, Draft

MIN_CONFIDENCE = 0.3
"""Where a draft stops unless told otherwise: a token that has this chance rarely pays for the step that drafts it."""

_LEAST = 1e-6
"""A confidence is above 0, whatever float32 makes of a probability."""


@dataclass(eq=False, kw_only=True)
class Line:
    """A request for the length of one call of ``propose``. Its rows are those of known tokens, then of drafted ones.

    first      index in the request's tokens of that of row 0;  num_known  rows of known tokens
    limit      tokens to draft at most;  max_nodes  nodes of its draft at most, leaves included
    num_computed  of its rows
    num_scheduled  rows of the step under way
    tokens, confidence, q  of the chain that is drafted;  product  of its confidences
    leaves     (row of the parent, 0 that of the last known token; token; confidence) of nodes besides the chain
    is_open    whether another token is drawn
    """

    context: Context
    num_known: int
    limit: int
    max_nodes: int
    first: int = 0
    slot: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[NDArray[np.float64]] = field(default_factory=list)
    leaves: list[tuple[int, int, float]] = field(default_factory=list)
    product: float = 1.0
    is_open: bool = True

    @property
    def num_rows(self) -> int:
        """Of known and drafted tokens."""
        return self.num_known + len(self.tokens)

    @property
    def gap(self) -> int:
        """Rows until the next token can be drawn."""
        return self.num_known + len(self.tokens) - self.num_computed

    @property
    def is_drawing(self) -> bool:
        """Whether the step under way draws a token."""
        return self.num_scheduled == self.gap

    def scheduled_tokens(self) -> list[int]:
        """The tokens of the step's rows."""
        start, end = self.num_computed, self.num_computed + self.num_scheduled
        if start >= self.num_known:
            return self.tokens[start - self.num_known : end - self.num_known]
        known = self.context.tokens[self.first + start : self.first + end]
        return known + self.tokens[: max(0, end - self.num_known)]

    def add(
        self, token: int, confidence: float, min_confidence: float, others: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Adds a drafted token, and ``others`` (token, confidence) beside it as leaves. It is the last one when the
        product of confidences falls under ``min_confidence``."""
        self.leaves += [(len(self.tokens), *other) for other in others]
        self.tokens.append(token)
        self.confidence.append(confidence)
        self.product *= confidence
        self.is_open = len(self.tokens) < self.limit and self.product >= min_confidence

    def draft(self, drafter: str) -> Draft | None:
        """What it proposes: the chain, and of the leaves what has room among the likeliest nodes."""
        if not self.tokens:
            return None
        if not self.leaves:
            return Draft.chain(self.tokens, self.confidence, drafter, self.q or None)
        assert not self.q, "a leaf that was not drawn has no q"
        products = [1.0, *np.cumprod(self.confidence).tolist()]
        chain = zip(self.tokens, self.confidence, strict=True)
        nodes = [(row, token, confidence) for row, (token, confidence) in enumerate(chain)] + self.leaves
        # A node is not likelier than its parent, and the sort keeps the order of equals: parents stay, too.
        order = sorted(range(len(nodes)), key=lambda node: -products[nodes[node][0]] * nodes[node][2])
        kept = [nodes[node] for node in sorted(order[: self.max_nodes])]
        parents, tokens, confidence = zip(*kept, strict=True)
        return Draft(tokens, parents, confidence, drafter)


def step_plan(
    lines: Sequence[Line],
    table: NDArray[np.int32],
    samples: SampleRows,
    *,
    page_copies: Sequence[tuple[int, int]] = (),
    features: NDArray[np.float32] | None = None,
) -> StepPlan:
    """The step of the lines' scheduled rows, a sequence each. ``table`` has the pages of all slots; ``samples`` says
    how the token of each line is drawn that is drawing."""
    tokens: list[int] = []
    positions: list[int] = []
    row_starts, logit_rows = [0], []
    for line in lines:
        tokens += line.scheduled_tokens()
        positions += range(line.num_computed, line.num_computed + line.num_scheduled)
        row_starts.append(len(tokens))
        if line.is_drawing:
            logit_rows.append(len(tokens) - 1)
    return StepPlan(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(row_starts, np.int32),
        table[[line.slot for line in lines], : max(positions) // PAGE_TOKENS + 1],
        np.array(logit_rows, np.int32),
        samples,
        np.array(page_copies, np.int32).reshape(-1, 2),
        features=features,
    )


def confidence_of(probability: float) -> float:
    """A probability as ``Draft`` wants it."""
    return min(1.0, max(_LEAST, probability))


def likeliest(tokens: Sequence[int], logprobs: Sequence[float], besides: int, most: int) -> list[tuple[int, float]]:
    """Up to ``most`` of the likeliest tokens besides the one that was drawn, each with its confidence."""
    pairs = zip(tokens, logprobs, strict=True)
    return [(token, confidence_of(math.exp(logprob))) for token, logprob in pairs if token != besides][:most]
