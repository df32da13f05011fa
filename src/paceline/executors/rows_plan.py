"""The plan of a pass over one sequence's rows, for those that drive an executor directly to time it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.config import PAGE_TOKENS
from paceline.executors.base import StepPlan
from paceline.sampling.rows import greedy_rows


def rows_plan(tokens: Sequence[int], start: int, *, num_outputs: int) -> StepPlan:
    """One sequence's rows at positions ``start``.., the last ``num_outputs`` with logits, over pages 0, 1, 2, ... in
    order."""
    num_rows, end = len(tokens), start + len(tokens)
    samples = greedy_rows(num_outputs)
    samples.rows["position"] = np.arange(end - num_outputs + 1, end + 1)
    return StepPlan(
        tokens=np.asarray(tokens, np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        row_starts=np.array([0, num_rows], np.int32),
        page_table=np.arange(-(-end // PAGE_TOKENS), dtype=np.int32)[None],
        logit_rows=np.arange(num_rows - num_outputs, num_rows, dtype=np.int32),
        samples=samples,
    )
