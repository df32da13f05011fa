"""How many rows of prompts a step may take while answers are running: no answer pauses for long, no prompt waits long.

Source: chunked prefill beside decodes, Sarathi-Serve (Agrawal et al. 2024, 2403.02310). There the chunk is a constant;
here it follows from the speed that was measured: a row late in a long prompt costs several times one at its beginning.

With one prompt the bound holds as it was asked for. What that costs is the prompt's alone: a step that answers take B
seconds of and the prompt R stretches the prompt's time by (B + R) / R. With many answers R is small, and when many
prompts wait each of them waits for all of those stretched ones before it: of 32 at once (SmolLM2, two cores) the last
had its first token after 16 s instead of 6. So with m prompts R is at least (m - 1) B, up to ``MOST_SHARE`` times B:
two are stretched by no more than 2, five or more by 1.25. Steps are longer than the bound only where the answers alone
take a good part of it, and as asked again when one prompt is left. They are planned to take no more than ``MOST_GAPS``
bounds, or twice what the answers take alone, if that is more: on a machine that slow two prompts are stretched by 2
still, and so are many. A queue that grows behind a stretched prompt is what gives it more, so nothing need know how
long anybody has waited.
"""

from __future__ import annotations

SHARE = 0.6
"""Of the gap that a step with prompts is planned to take: the rest is for what cannot be foreseen."""

HARD_SHARE = 0.9
"""Of the gap that a step may take when the answers alone take most of it."""

MOST_SHARE = 4.0
"""Most that prompts get of a step for each second that its answers take, when many wait."""

MOST_GAPS = 4.0
"""Bounds that a step may take, when several prompts wait."""

FIRST_ROWS = 16
"""Rows of the first such step, when nothing has been measured yet."""

FEWEST_ROWS = 4
"""Of any step: a smaller chunk reads all weights for almost nothing. SmolLM2's rows cost 1.5 ms at the beginning and 6
to 9 ms behind 7,900 tokens (two Zen 3 cores), so that 16 of them alone would be above the default bound."""

KEEP = 0.7
"""Weight of what was known in a running mean."""


class ChunkPacer:
    """Follows the time of steps: ``base_s`` of one with ``num_base`` answers alone, ``row_s`` of a prompt's row on top.

    While prompts are read no step has answers alone, and the answers become more. Each of those that came since is
    taken for as expensive as a prompt's row.

    ``max_gap_ms`` is the longest time that a step with decodes and one prompt should take; None: no bound.
    """

    def __init__(self, max_gap_ms: float | None) -> None:
        self.max_gap_s = None if max_gap_ms is None else max_gap_ms / 1000
        self.base_s = 0.0
        self.num_base = 0
        self.row_s: float | None = None

    def max_rows(self, num_decodes: int, num_prompts: int) -> int | None:
        """Rows of prompts that the next step may take beside so many decodes, when so many prompts are being read or
        could be; None: as many as the budget has."""
        if self.max_gap_s is None:
            return None
        if self.row_s is None:
            return FIRST_ROWS
        base_s = self.decode_s(num_decodes)
        room_s = max(self._room_s(base_s, self.max_gap_s), self._given_s(base_s, self.max_gap_s, num_prompts))
        return max(FEWEST_ROWS, int(room_s / max(self.row_s, 1e-9)))

    def decode_s(self, num_decodes: int) -> float:
        """What a step with so many answers alone takes, as far as is known. Of fewer than were seen, their part: too
        little, so that rows are rather taken for too expensive."""
        if num_decodes < self.num_base:
            return self.base_s * num_decodes / self.num_base
        return self.base_s + (num_decodes - self.num_base) * (self.row_s or 0.0)

    @staticmethod
    def _room_s(base_s: float, max_gap_s: float) -> float:
        """Time that a step may give to one prompt. Where the answers alone leave little, up to half of theirs, so that
        it does not starve: within nine tenths of the bound, or beyond it where the answers alone break it."""
        half = base_s / 2
        if base_s < HARD_SHARE * max_gap_s:
            half = min(half, HARD_SHARE * max_gap_s - base_s)
        return max(SHARE * max_gap_s - base_s, half)

    @staticmethod
    def _given_s(base_s: float, max_gap_s: float, num_prompts: int) -> float:
        """Time that a step gives to prompts because so many wait, beyond the bound if it must."""
        wanted_s = min(num_prompts - 1, MOST_SHARE) * base_s
        return min(wanted_s, max(SHARE * MOST_GAPS * max_gap_s - base_s, base_s))

    def observe(self, num_decodes: int, num_rows: int, elapsed_s: float) -> None:
        """Takes in the time of a step with so many decodes and rows of prompts; few of those say little."""
        if num_rows == 0:
            known_s = self.decode_s(num_decodes)
            self.base_s = elapsed_s if self.num_base == 0 else KEEP * known_s + (1 - KEEP) * elapsed_s
            self.num_base = num_decodes
            return
        if num_rows < FEWEST_ROWS:
            return
        num_new = max(0, num_decodes - self.num_base)
        base_s = self.decode_s(num_decodes - num_new)
        row_s = max(0.0, elapsed_s - base_s) / (num_rows + num_new)
        if self.row_s is None:
            self.row_s = row_s
        else:  # slower at once, since prompts grow more expensive with depth; faster only by and by
            self.row_s = max(row_s, KEEP * self.row_s + (1 - KEEP) * row_s)
