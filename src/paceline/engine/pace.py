"""How many rows of prompts a step may take while answers are running, so that no answer pauses for long.

Source: chunked prefill beside decodes, Sarathi-Serve (Agrawal et al. 2024, 2403.02310). There the chunk is a constant;
here it follows from the speed that was measured: a row late in a long prompt costs several times one at its beginning.
"""

from __future__ import annotations

SHARE = 0.6
"""Of the gap that a step with prompts is planned to take: the rest is for what cannot be foreseen."""

HARD_SHARE = 0.9
"""Of the gap that a step may take when the answers alone take most of it."""

FIRST_ROWS = 16
"""Rows of the first such step, when nothing has been measured yet."""

FEWEST_ROWS = 4
"""Of any step: a smaller chunk reads all weights for almost nothing. SmolLM2's rows cost 1.5 ms at the beginning and 6
to 9 ms behind 7,900 tokens (two Zen 3 cores), so that 16 of them alone would be above the default bound."""

KEEP = 0.7
"""Weight of what was known in a running mean."""


class ChunkPacer:
    """Follows the time of steps: ``base_s`` of one that only decodes, and ``row_s`` of a prompt's row on top of it.

    ``max_gap_ms`` is the longest time that a step with decodes and prompts should take; None: no bound.
    """

    def __init__(self, max_gap_ms: float | None) -> None:
        self.max_gap_s = None if max_gap_ms is None else max_gap_ms / 1000
        self.base_s = 0.0
        self.row_s: float | None = None

    @property
    def max_rows(self) -> int | None:
        """Rows of prompts that the next step may take beside decodes; None: as many as the budget has."""
        if self.max_gap_s is None:
            return None
        if self.row_s is None:
            return FIRST_ROWS
        return max(FEWEST_ROWS, int(self._room_s(self.max_gap_s) / max(self.row_s, 1e-9)))

    def _room_s(self, max_gap_s: float) -> float:
        """Time that a step may give to prompts. Where the answers alone leave little, up to half of theirs, so that
        prompts do not starve: within nine tenths of the bound, or beyond it where the answers alone break it."""
        half = self.base_s / 2
        if self.base_s < HARD_SHARE * max_gap_s:
            half = min(half, HARD_SHARE * max_gap_s - self.base_s)
        return max(SHARE * max_gap_s - self.base_s, half)

    def observe(self, num_requests: int, num_rows: int, elapsed_s: float) -> None:
        """Takes the time of a step in. One row of a request is a decode; few more rows say little."""
        if num_rows == num_requests:
            self.base_s = elapsed_s if self.base_s == 0.0 else KEEP * self.base_s + (1 - KEEP) * elapsed_s
            return
        num_prefill_rows = num_rows - num_requests + 1
        if num_prefill_rows < FEWEST_ROWS:
            return
        base_s = self.base_s if num_requests > 1 else 0.0
        row_s = max(0.0, elapsed_s - base_s) / num_prefill_rows
        if self.row_s is None:
            self.row_s = row_s
        else:  # slower at once, since prompts grow more expensive with depth; faster only by and by
            self.row_s = max(row_s, KEEP * self.row_s + (1 - KEEP) * row_s)
