"""Scores models on the same windows, side by side: perplexity, KL divergence from a reference, agreement with it.

Each window is read by every model before the next, in steps of some rows, and their logits are compared at once: no
text's logits are ever kept. They are what the engine computes: its weights, its activations, its keys and values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.executors.base import Executor
from paceline.executors.rows_plan import rows_plan
from paceline.measure.quality.bootstrap import mean_interval
from paceline.measure.quality.divergence import Logits, ScoredRows, kl_rows, score_rows
from paceline.measure.quality.subject import STEP_ROWS, Subject
from paceline.measure.quality.windows import Window
from paceline.measure.runs import Report, quiet
from paceline.sampling.rows import greedy_rows

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Figures:
    """What was found of one model, token by token, in the order of the text.

    nll     [tokens] f64   -log probability of the token, in nats
    kl      [tokens] f64   KL(reference || model), in nats; None without a reference, as are the next two
    agrees  [tokens] bool  whether the likeliest token is the reference's
    reference_nll [tokens] f64
    """

    nll: NDArray[np.float64]
    kl: NDArray[np.float64] | None = None
    agrees: NDArray[np.bool_] | None = None
    reference_nll: NDArray[np.float64] | None = None

    def document(self) -> dict[str, Any]:
        """Means, percentiles and 95 % intervals as plain data; intervals are None for short texts."""
        result: dict[str, Any] = {
            "tokens": len(self.nll),
            "perplexity": math.exp(self.nll.mean()),
            "perplexity_ci": _exp(mean_interval(self.nll)),
        }
        if self.kl is None or self.agrees is None or self.reference_nll is None:
            return result
        # Both models read the same tokens, so the ratio is known far better than either perplexity.
        gap = self.nll - self.reference_nll
        median, p99, p999 = np.quantile(self.kl, [0.5, 0.99, 0.999])
        return result | {
            "perplexity_ratio": math.exp(gap.mean()),
            "perplexity_ratio_ci": _exp(mean_interval(gap)),
            "kl_mean": float(self.kl.mean()),
            "kl_mean_ci": mean_interval(self.kl),
            "kl_median": float(median),
            "kl_p99": float(p99),
            "kl_p999": float(p999),
            "kl_max": float(self.kl.max()),
            "top1_agreement": float(self.agrees.mean()),
            "top1_agreement_ci": mean_interval(self.agrees.astype(np.float64)),
        }


def evaluate(
    subjects: Sequence[Subject],
    windows: Sequence[Window],
    *,
    reference: Subject | None = None,
    num_shared: int | None = None,
    report: Report = quiet,
) -> tuple[list[Figures], Figures | None]:
    """The figures of each subject, and of the reference, over all targets of ``windows``.

    ``num_shared`` is the number of ids that all vocabularies have; logits past it are left out, of perplexities as
    well. Raises ``PacelineError`` where a model's logits are not finite.
    """
    everyone = [*([] if reference is None else [reference]), *subjects]
    shared = min(one.executor.model.num_logits for one in everyone) if num_shared is None else num_shared
    total = sum(len(window.targets) for window in windows)
    nll = np.zeros((len(everyone), total))
    kl = np.zeros_like(nll)
    tops = np.zeros(nll.shape, np.int64)
    weights = np.empty((STEP_ROWS, shared), np.float32)
    done = 0
    for window in windows:
        for start, outputs in _steps(window):
            targets = window.tokens[outputs + 1]
            slot = slice(done, done + len(outputs))
            first: tuple[Logits, ScoredRows] | None = None
            for at, subject in enumerate(everyone):
                logits = _logits(subject, window, start, outputs)[:, :shared]
                is_reference = reference is not None and at == 0
                rows = score_rows(logits, targets, weights if is_reference else None)
                nll[at, slot], tops[at, slot] = rows.nll, rows.top
                if is_reference:
                    first = logits, rows
                elif first is not None:
                    kl[at, slot] = kl_rows(*first, weights, logits, rows)
            done += len(outputs)
            report(done, total)
    if reference is None:
        return [Figures(row) for row in nll], None
    figures = [Figures(nll[at], kl[at], tops[at] == tops[0], reference_nll=nll[0]) for at in range(1, len(everyone))]
    return figures, Figures(nll[0])


def subject_document(subject: Subject, figures: Figures) -> dict[str, Any]:
    """What is known of one model as plain data."""
    return {
        "model": subject.name,
        "bytes": subject.num_bytes,
        "file_bytes": subject.file_bytes,
        "bits_per_weight": 8 * subject.num_bytes / subject.num_parameters,
        "path": {**subject.executor.path(), "head": subject.head},
        **figures.document(),
    }


def _steps(window: Window) -> list[tuple[int, NDArray[np.int32]]]:
    """The first row of each step and the rows whose logits are wanted; rows after the last of them are not read."""
    rows = window.targets - 1
    starts = range(0, int(rows[-1]) + 1, STEP_ROWS)
    return [(start, rows[(rows >= start) & (rows < start + STEP_ROWS)]) for start in starts]


def _logits(subject: Subject, window: Window, start: int, outputs: NDArray[np.int32]) -> Logits:
    """The logits [outputs, vocab] of one step, valid until the executor's next."""
    executor: Executor = subject.executor
    end = min(start + STEP_ROWS, int(window.targets[-1]))
    plan = rows_plan(window.tokens[start:end].tolist(), start, num_outputs=0)
    plan = dataclasses.replace(plan, logit_rows=outputs - start, samples=greedy_rows(len(outputs)))
    result = executor.run(plan)
    status = result.sampled.status
    if status is not None and status.any():
        position = start + int(np.flatnonzero(status)[0])
        raise PacelineError(f"{subject.name}: a logit after token {position} of a window is not finite")
    return executor.logits()


def _exp(interval: Interval) -> Interval:
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
