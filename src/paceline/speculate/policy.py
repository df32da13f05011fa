"""Who decides how much is drafted and verified; and the simplest answer, a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.speculate.counts import SpeculationCounts, Tally
from paceline.speculate.draft import Draft


class Policy(Protocol):
    """Decides how much is drafted and verified: ``Controller``, by what pays, or ``FixedPolicy``."""

    def begin_step(self, num_rows: int, num_requests: int, room: int) -> None:
        """A step of ``num_rows`` rows without drafts, ``num_requests`` of whose requests get a token, with ``room`` for
        more rows."""
        ...

    def limits(self, drafter: str, is_free: bool, request_ids: Sequence[int]) -> list[int]:
        """How many tokens to ask a drafter for, for each of one or more requests."""
        ...

    def choose(
        self,
        drafter: str,
        request_ids: Sequence[int],
        drafts: Sequence[Draft | None],
        *,
        spent_s: float,
        price_s: float,
    ) -> list[Draft | None]:
        """What of the drafts is verified; of those that were drawn, all. ``spent_s`` went into asking, of it
        ``price_s`` into these drafts: no catching up, and 0 for a free drafter."""
        ...

    def observe(self, request_id: int, proposed: Draft, verified: Draft | None, tokens: Sequence[int]) -> None:
        """Learns what tokens came where ``proposed`` was proposed and ``verified`` of it was verified."""
        ...

    def observe_draft_cost(self, drafter: str, longest: int, elapsed_s: float) -> None:
        """Learns what a drafter that is not free took for drafts of which the longest has so many tokens >= 1."""
        ...

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float, *, teaches: bool) -> None:
        """The end of every step: its rows in all, the tokens of its requests, and what it took. It ``teaches`` what
        steps cost where all of its rows were outputs and it did not fail."""
        ...

    def counts(self) -> SpeculationCounts:
        """Of all requests."""
        ...

    def finish(self, request_id: int) -> SpeculationCounts:
        """Forgets a request, whose last counts it returns."""
        ...


class FixedPolicy:
    """Asks for ``num_tokens`` at every step and verifies all that comes: for experiments, and to prove that no draft
    changes an answer. It may well be slower than no drafts."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._total = Tally()
        self._requests: dict[int, Tally] = {}

    def begin_step(self, num_rows: int, num_requests: int, room: int) -> None:
        """Does not matter."""

    def limits(self, drafter: str, is_free: bool, request_ids: Sequence[int]) -> list[int]:
        """The number."""
        return [self._num_tokens] * len(request_ids)

    def choose(
        self,
        drafter: str,
        request_ids: Sequence[int],
        drafts: Sequence[Draft | None],
        *,
        spent_s: float,
        price_s: float,
    ) -> list[Draft | None]:
        """All of them."""
        return list(drafts)

    def observe(self, request_id: int, proposed: Draft, verified: Draft | None, tokens: Sequence[int]) -> None:
        """Counts."""
        if verified is not None:
            for tally in (self._total, self._requests.setdefault(request_id, Tally())):
                tally.add(verified, max(verified.depths()), verified.num_taken(tokens))

    def observe_draft_cost(self, drafter: str, longest: int, elapsed_s: float) -> None:
        """Does not matter."""

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float, *, teaches: bool) -> None:
        """Does not matter."""

    def counts(self) -> SpeculationCounts:
        """Of all requests; seconds saved are not estimated."""
        return self._total.snapshot(None)

    def finish(self, request_id: int) -> SpeculationCounts:
        """Of the request."""
        return self._requests.pop(request_id, Tally()).snapshot(None)
