"""A request while a draft model runs ahead of it: what is known, drafted, computed and scheduled of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.speculate.draft import Context, Draft


@dataclass(eq=False)
class Line:
    """A request for the length of one call of ``propose``.

    num_known     tokens of the request
    limit         tokens to draft at most;  max_nodes  nodes of its draft at most, branches included
    num_computed  of its tokens, known ones and then drafted ones
    num_scheduled  rows of the step under way
    tokens, confidence, q  of the drafted ones;  product  of their confidences
    branches  (token, confidence) besides the first of them;  is_open  whether another one is drawn
    """

    context: Context
    num_known: int
    limit: int
    max_nodes: int
    slot: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[NDArray[np.float64]] = field(default_factory=list)
    branches: list[tuple[int, float]] = field(default_factory=list)
    product: float = 1.0
    is_open: bool = True

    @property
    def num_tokens(self) -> int:
        """Known and drafted ones."""
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
        return self.context.tokens[start:end] + self.tokens[: max(0, end - self.num_known)]

    def add(self, token: int, confidence: float, min_confidence: float) -> None:
        """Adds a drafted token. It is the last one when the product of confidences falls under ``min_confidence``."""
        self.tokens.append(token)
        self.confidence.append(confidence)
        self.product *= confidence
        self.is_open = len(self.tokens) < self.limit and self.product >= min_confidence

    def draft(self, drafter: str) -> Draft | None:
        """What it proposes: the chain, and of the branches what has room among the likeliest nodes."""
        if not self.tokens:
            return None
        if not self.branches:
            return Draft.chain(self.tokens, self.confidence, drafter, self.q or None)
        length = len(self.tokens)
        products = [*np.cumprod(self.confidence).tolist(), *(confidence for _, confidence in self.branches)]
        # Products only fall along the chain and the sort keeps the order of equals: what stays of it is its beginning.
        likeliest = sorted(range(len(products)), key=lambda node: -products[node])[: self.max_nodes]
        kept = sum(node < length for node in likeliest)
        branches = [self.branches[node - length] for node in sorted(likeliest) if node >= length]
        return Draft(
            (*self.tokens[:kept], *(token for token, _ in branches)),
            (*range(kept), *(0 for _ in branches)),
            (*self.confidence[:kept], *(confidence for _, confidence in branches)),
            drafter,
        )
