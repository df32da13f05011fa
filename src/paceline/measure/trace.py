"""An executor that writes down what another one computed: the two likeliest tokens of every output, the shape of every
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, ModelConfig
from paceline.executors.base import Executor, StepPlan, StepResult
from paceline.sampling.rows import SampledRows, SampleRows


@dataclass(frozen=True)
class TopTwo:
    """The two likeliest tokens of an output, the first of equals first, and the model's own logits of them (float32
    values)."""

    tokens: tuple[int, int]
    logits: tuple[float, float]

    @classmethod
    def of(cls, logits: NDArray[np.float32]) -> TopTwo:
        """Of one row of logits [vocab]; a NaN counts as the largest."""
        rest = logits.copy()
        first = int(np.argmax(rest))
        rest[first] = -np.inf
        second = int(np.argmax(rest))
        return cls((first, second), (float(logits[first]), float(logits[second])))

    @property
    def margin(self) -> float:
        """How far the second is behind the first."""
        return self.logits[0] - self.logits[1]


@dataclass(frozen=True)
class Output:
    """One output of a step, and its sequence's rows in that step: positions first_position up to its own.

    ``drafted`` are the tokens before it, as (position, token), that the same step computed with outputs of their own:
    if the answer has others there, this is the output of a draft that was refused. ``logits`` [vocab] are kept where
    the trace was told to.
    """

    top: TopTwo
    first_position: int
    num_rows: int
    drafted: tuple[tuple[int, int], ...] = ()
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class StepShape:
    """Sequences of a step, the rows of the one that had most, and the splits of keys that attention had read already,
    for another sequence (None where the executor does not tell). Sequences that have a computed beginning written to
    their pages by others are branches of a draft; the others are as many as requests."""

    num_sequences: int
    max_rows: int
    shared_splits: int | None = None
    num_branches: int = 0

    @property
    def num_requests(self) -> int:
        """Sequences that are no branches."""
        return self.num_sequences - self.num_branches


@dataclass
class Trace:
    """What was seen: outputs by (seed, position of the token that is drawn), the latest last, and steps.

    The seed names the request, so requests that are told apart need seeds of their own.
    """

    outputs: dict[tuple[int, int], list[Output]] = field(default_factory=dict)
    steps: list[StepShape] = field(default_factory=list)

    def output(self, seed: int, tokens: Sequence[int], position: int) -> Output | None:
        """The latest output at which token ``position`` of a request was drawn; ``tokens`` are its prompt and answer up
        to there at least, which tells it from outputs of drafts that were refused."""
        for output in reversed(self.outputs.get((seed, position), [])):
            if all(tokens[at] == token for at, token in output.drafted):
                return output
        return None


class TracingExecutor:
    """An ``Executor`` over another that adds to ``trace`` what each step computes. ``num_pages`` may present a smaller
    pool than there is. Between runs of an engine, ``watch`` starts a new trace.

    written_pages  all that steps have ever written or copied to
    """

    def __init__(self, executor: Executor, *, num_pages: int | None = None) -> None:
        assert num_pages is None or num_pages <= executor.num_pages
        self.executor = executor
        self.model: ModelConfig = executor.model
        self.num_pages = executor.num_pages if num_pages is None else num_pages
        self.max_rows = executor.max_rows
        self.max_outputs = executor.max_outputs
        self.pages = executor.pages[: self.num_pages]
        self.written_pages: set[int] = set()
        self.watch()

    def watch(self, *, keep_logits: bool = False) -> Trace:
        """The trace of all that comes from now on; it keeps whole rows of logits if wanted."""
        self.trace = Trace()
        self._keep_logits = keep_logits
        return self.trace

    def run(self, plan: StepPlan) -> StepResult:
        """The step of the executor below."""
        result = self.executor.run(plan)
        logits = self.executor.logits()
        rows = np.diff(plan.row_starts)
        self.written_pages.update(_written_pages(plan))
        shared_splits = getattr(self.executor, "shared_splits", None)
        num_branches = len(np.unique(plan.kv_writes[:, 1]))
        self.trace.steps.append(StepShape(len(rows), int(rows.max()), shared_splits, num_branches))
        sequence_of = np.repeat(np.arange(len(rows)), rows)
        keys = zip(plan.samples.rows["seed"].tolist(), plan.samples.rows["position"].tolist(), strict=True)
        for key, row, values in zip(keys, plan.logit_rows.tolist(), logits, strict=True):
            sequence = sequence_of[row]
            output = Output(
                TopTwo.of(values),
                int(plan.positions[plan.row_starts[sequence]]),
                int(rows[sequence]),
                _drafted(plan, int(sequence), row),
                values.copy() if self._keep_logits else None,
            )
            self.trace.outputs.setdefault(key, []).append(output)
        return result

    def logits(self) -> NDArray[np.float32]:
        """Those of the executor below."""
        return self.executor.logits()

    def hidden(self) -> NDArray[np.float32]:
        """That of the executor below."""
        return self.executor.hidden()

    def probabilities(self, samples: SampleRows, outputs: Sequence[int]) -> NDArray[np.float64]:
        """Those of the executor below."""
        return self.executor.probabilities(samples, outputs)

    def score(self, samples: SampleRows, outputs: Sequence[int]) -> SampledRows:
        """That of the executor below."""
        return self.executor.score(samples, outputs)

    def path(self) -> dict[str, str | int]:
        """That of the executor below."""
        return self.executor.path()


def _drafted(plan: StepPlan, sequence: int, row: int) -> tuple[tuple[int, int], ...]:
    """(position, token) of the rows with outputs that come before ``row`` in its sequence, those included that another
    sequence computes for it."""
    rows = [*range(plan.row_starts[sequence], row + 1), *plan.kv_writes[plan.kv_writes[:, 1] == sequence, 0].tolist()]
    with_outputs = set(rows) & set(plan.logit_rows.tolist())
    if with_outputs == {row}:
        return ()
    return tuple((int(plan.positions[one]), int(plan.tokens[one])) for one in sorted(with_outputs))


def _written_pages(plan: StepPlan) -> set[int]:
    first = plan.positions[plan.row_starts[:-1]] // PAGE_TOKENS
    last = plan.positions[plan.row_starts[1:] - 1] // PAGE_TOKENS
    pages = set(plan.page_copies[:, 1].tolist())
    for table, begin, end in zip(plan.page_table, first, last + 1, strict=True):
        pages.update(table[begin:end].tolist())
    rows, sequences = plan.kv_writes.T
    pages.update(plan.page_table[sequences, plan.positions[rows] // PAGE_TOKENS].tolist())
    return pages
