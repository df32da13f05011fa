"""What a drafter sees of a request and what it proposes: tokens that may follow, as a tree.

Source: Leviathan et al. 2022 (2211.17192) and Chen et al. 2023 (2302.01318) for chains; Miao et al. 2023 (SpecInfer,
2305.09781) for trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.params import SamplingParams
from paceline.sampling.constraint import Constraint
from paceline.sampling.lists import ListsBuilder

MAX_NODES = 64
"""Most tokens that one draft may hold."""


class Context(Protocol):
    """What a drafter may read of a request. It must change nothing.

    tokens      prompt and output; the last one has not been computed by the target yet
    num_prompt  of them the prompt
    max_tokens  prompt and output at most: what is drafted beyond can never be accepted
    domain      whose past outputs may be used for it
    record      [1] SAMPLE_ROW: how the target draws, without position and lists
    slot        of its page table in the target's KV manager
    constraint  what its structure allows to follow ``tokens``; None without one
    """

    @property
    def request_id(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def domain(self) -> bytes: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def record(self) -> NDArray[np.void]: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def constraint(self) -> Constraint | None: ...

    def add_lists(self, lists: ListsBuilder, output: int, path: Sequence[int]) -> None:
        """Adds to ``lists``, for the step's output number ``output``, what penalises, biases, bans and masks its token:
        the one that follows ``tokens`` and ``path``."""
        ...


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow a request's last one.

    The request's rows in the step are the last known token, row 0, then the nodes in order: node i is row i + 1.

    tokens      [nodes] ids
    parents     [nodes] row of the parent of each node, parents[i] <= i; siblings differ in their tokens
    confidence  [nodes] the drafter's own estimate, 0 < c <= 1, that the target takes the node, given its parent
    drafter     who proposed it
    q           distributions [vocab] from which the nodes were drawn, siblings without replacement from one; None for
                the whole draft, or for a node, where the proposal was certain
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...]
    drafter: str
    q: tuple[NDArray[np.float64] | None, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.confidence) <= MAX_NODES
        assert self.q is None or len(self.q) == len(self.tokens)
        assert all(0 <= parent <= node for node, parent in enumerate(self.parents)), "a parent comes before its child"

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        confidence: Sequence[float],
        drafter: str,
        q: Sequence[NDArray[np.float64] | None] | None = None,
    ) -> Draft:
        """Tokens each of which follows the one before."""
        return cls(
            tuple(tokens), tuple(range(len(tokens))), tuple(confidence), drafter, None if q is None else tuple(q)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before."""
        return self.parents == tuple(range(len(self.parents)))

    def path(self, row: int) -> list[int]:
        """Rows from the first node down to ``row``, which is the last; empty for row 0."""
        rows: list[int] = []
        while row > 0:
            rows.append(row)
            row = self.parents[row - 1]
        return rows[::-1]

    def children(self, row: int) -> list[int]:
        """Rows that follow ``row``, in the order in which they were proposed."""
        return [node + 1 for node, parent in enumerate(self.parents) if parent == row]

    def depths(self) -> list[int]:
        """How far each node is from row 0: 1 for what may follow the last known token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths[1:]

    def num_taken(self, tokens: Sequence[int]) -> int:
        """How many of its nodes, from row 0 down, became the beginning of ``tokens``."""
        row = depth = 0
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == row and depth < len(tokens) and token == tokens[depth]:
                row, depth = node + 1, depth + 1
        return depth

    def in_branches(self) -> Draft:
        """The same tree depth first, so that the nodes of a branch are neighbours: ``branch_starts`` tells where."""
        if self.is_chain:
            return self
        order: list[int] = []
        rest = self.children(0)[::-1]
        while rest:
            row = rest.pop()
            order.append(row - 1)
            rest += self.children(row)[::-1]
        row_of = {0: 0} | {node + 1: at + 1 for at, node in enumerate(order)}
        return Draft(
            tuple(self.tokens[node] for node in order),
            tuple(row_of[self.parents[node]] for node in order),
            tuple(self.confidence[node] for node in order),
            self.drafter,
            None if self.q is None else tuple(self.q[node] for node in order),
        )

    def branch_starts(self) -> list[int]:
        """Rows at which a branch begins: row 0, and each that does not follow the row before it."""
        return [0] + [node + 1 for node, parent in enumerate(self.parents) if parent != node]

    def keep(self, nodes: Sequence[int]) -> Draft:
        """The draft of some nodes only, ascending; parents must be among them."""
        row_of = {0: 0} | {node + 1: at + 1 for at, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(row_of[self.parents[node]] for node in nodes),
            tuple(self.confidence[node] for node in nodes),
            self.drafter,
            None if self.q is None else tuple(self.q[node] for node in nodes),
        )


class Drafter(Protocol):
    """Proposes tokens. Whatever it proposes, answers stay the same; only their speed depends on it.

    A request may be asked for at any time and not at every step; its ``tokens`` only grow. Called from the engine's
    thread only.
    """

    name: str
    is_free: bool
    """Whether proposing costs microseconds, so that it is always asked, and learns also from what is not verified."""

    catch_up_s: float
    """Seconds of the last ``propose`` that went into what requests have, not into drafts: no price of a draft."""

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """For each request a draft of 1 to ``limits[i]`` nodes (``limits[i]`` >= 1), or None. Ids lie within the
        target's vocabulary."""
        ...

    def finish(self, context: Context) -> None:
        """The request has ended: what is kept for it goes, and its output may help others of its domain. Also called
        for requests that were never asked for."""
        ...


@runtime_checkable
class NeedsStructure(Protocol):
    """A drafter that knows nothing of requests without a structure, and is not asked about them."""

    needs_structure: bool
