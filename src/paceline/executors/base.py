"""What goes down to an executor for one step and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig
from paceline.sampling.rows import SampledRows, SampleRows


@dataclass(frozen=True)
class StepPlan:
    """The rows of one pass through the model, grouped by sequence.

    tokens      [rows] i32         token ids
    positions   [rows] i32         position of each row in its sequence; rows of a sequence are consecutive and
    ascending
    row_starts  [sequences+1] i32  rows of sequence s are row_starts[s] : row_starts[s+1]
    page_table  [sequences, p] i32 page of tokens 32*j : 32*j+32 of sequence s; entries past its length are ignored
    logit_rows  [outputs] i32      rows whose logits are wanted, ascending
    samples                        one entry an output, how its token is chosen
    page_copies [n, 2] i32         (source, destination) pages to copy before anything else
    kv_writes   [n, 2] i32         (row, sequence): the row's keys and values are also written to that sequence's pages,
    at the row's position; ascending by row
    features    [rows, width] f32  what the op of that name reads; None for models without it

    A row attends to positions 0..its own of its sequence (within the sliding window): earlier ones are read from pages,
    those of the same step are written first. So the branches of a tree of tokens are sequences too: each node is a row
    of one of them, and what comes before the fork is written to the pages of all.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    row_starts: NDArray[np.int32]
    page_table: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    samples: SampleRows
    page_copies: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    kv_writes: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    features: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class StepResult:
    """What one pass chose: ``sampled`` has one entry per ``StepPlan.logit_rows``."""

    sampled: SampledRows


class Executor(Protocol):
    """Runs steps of one model over one KV pool. Not thread-safe: one step at a time."""

    model: ModelConfig
    num_pages: int
    max_rows: int
    max_outputs: int
    pages: NDArray[np.uint8]
    """The KV pool [num_pages, page_bytes]: a page's bytes are all that its tokens' keys and values are. Read and write
    it between steps only."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step, writing the keys and values of its rows into the pages that the plan names."""
        ...

    def logits(self) -> NDArray[np.float32]:
        """Logits [outputs, vocab] of the last step, valid until the next."""
        ...

    def hidden(self) -> NDArray[np.float32]:
        """The residual stream [rows, hidden] after the last layer, before the final norm, of all rows of the last
        step, valid until the next. It is what the head reads, so that it has the same bits on every path, too."""
        ...

    def probabilities(self, samples: SampleRows, outputs: Sequence[int]) -> NDArray[np.float64]:
        """The distributions p [len(outputs), vocab] that the tokens of these outputs of the last step are drawn from,
        by their records in ``samples``: of all outputs of that step, though lists may differ from those it ran with.
        A forced token is ignored. Raises ``NoTokenError``."""
        ...

    def score(self, samples: SampleRows, outputs: Sequence[int]) -> SampledRows:
        """What the records of ``samples`` choose and report at these outputs of the last step, one after the other."""
        ...

    def path(self) -> dict[str, str | int]:
        """The path that really runs: isa, threads, weights, kv_dtype."""
        ...
