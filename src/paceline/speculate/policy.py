"""Who decides how much is drafted and verified; and the simplest answer, a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.speculate.counts import SpeculationCounts, Tally
from paceline.speculate.draft import Draft


class Policy(Protocol):
    """Decides how much is drafted and verified: ``Controller``, by what pays, or ``FixedPolicy``."""

    def limits(
        self, drafter: str, is_free: bool, request_ids: Sequence[int], num_rows: int, num_requests: int
    ) -> list[int]:
        """How many tokens to ask a drafter for, for each request, in a step of ``num_rows`` rows without drafts."""
        ...

    def choose(
        self,
        request_ids: Sequence[int],
        drafts: Sequence[Draft | None],
        num_rows: int,
        num_requests: int,
        draft_cost_s: float,
    ) -> list[Draft | None]:
        """What of the drafts is verified."""
        ...

    def observe(self, request_id: int, proposed: Draft, verified: Draft | None, tokens: Sequence[int]) -> None:
        """Learns what tokens came where ``proposed`` was proposed and ``verified`` of it was verified."""
        ...

    def observe_draft_cost(self, drafter: str, longest: int, elapsed_s: float) -> None:
        """Learns what a drafter that is not free took for drafts of which the longest has so many tokens >= 1."""
        ...

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float) -> None:
        """Learns what a step of that many rows, all of them outputs, took; its requests have so many tokens."""
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

    def limits(
        self, drafter: str, is_free: bool, request_ids: Sequence[int], num_rows: int, num_requests: int
    ) -> list[int]:
        """The number."""
        return [self._num_tokens] * len(request_ids)

    def choose(
        self,
        request_ids: Sequence[int],
        drafts: Sequence[Draft | None],
        num_rows: int,
        num_requests: int,
        draft_cost_s: float,
    ) -> list[Draft | None]:
        """All of them."""
        return list(drafts)

    def observe(self, request_id: int, proposed: Draft, verified: Draft | None, tokens: Sequence[int]) -> None:
        """Counts."""
        if verified is not None:
            for tally in (self._total, self._requests.setdefault(request_id, Tally())):
                tally.add(verified, max(verified.depths()), len(tokens) - 1)

    def observe_draft_cost(self, drafter: str, longest: int, elapsed_s: float) -> None:
        """Does not matter."""

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float) -> None:
        """Does not matter."""

    def counts(self) -> SpeculationCounts:
        """Of all requests; seconds saved are not estimated."""
        return self._total.snapshot(None)

    def finish(self, request_id: int) -> SpeculationCounts:
        """Of the request."""
        return self._requests.pop(request_id, Tally()).snapshot(None)
