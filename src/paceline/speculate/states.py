"""What a controller knows of the running requests, of the drafters, and of the step under way."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.speculate.acceptance import Acceptance
from paceline.speculate.counts import Tally, ZeroReason
from paceline.speculate.spending import DraftCost, Probing


class RequestState:
    """A running request: its odds against each drafter's average, its counts, and for each drafter how many of its last
    drafts began with a node too unlikely to pay."""

    __slots__ = ("odds", "tally", "weak", "zero_reason")

    def __init__(self) -> None:
        self.odds: dict[str, float] = {}
        self.weak: dict[str, int] = {}
        self.tally = Tally()
        self.zero_reason: ZeroReason | None = None


class DrafterState:
    """A drafter: how its nodes fare, what its drafts cost, and when it is probed."""

    __slots__ = ("acceptance", "cost", "probing")

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.cost = DraftCost()
        self.probing = Probing()


@dataclass(slots=True)
class StepState:
    """The step under way.

    num_rows      without drafts
    room          for nodes
    plain_s       what it takes without drafts
    token_s       what a token takes in plain decoding of these requests
    num_chosen    nodes to verify, and the tokens they are expected to give
    payers        requests and their nodes
    is_plain      nothing is to be verified, so that T(n) is seen
    is_exploring  something was chosen although it does not seem to pay
    is_over       its time is known
    """

    num_rows: int = 0
    num_requests: int = 0
    room: int = 0
    plain_s: float = 0.0
    token_s: float = 0.0
    num_chosen: int = 0
    expected: float = 0.0
    payers: list[tuple[RequestState, int]] | None = None
    is_plain: bool = False
    is_exploring: bool = False
    is_over: bool = True
