"""What speculation did: tokens drafted, verified and accepted, time saved, and why it last did nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any

from paceline.speculate.draft import MAX_NODES, Draft


class ZeroReason(str, Enum):
    """Why nothing was verified in a step."""

    NO_MATCH = "no match"
    DOES_NOT_PAY = "does not pay at this batch"
    ACCEPTANCE_TOO_LOW = "acceptance too low"
    NO_ROOM = "no room"


@dataclass(frozen=True)
class DrafterCounts:
    """One drafter's part: ``steps`` in which a draft of a request was verified, nodes verified and accepted."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def __add__(self, other: DrafterCounts) -> DrafterCounts:
        return DrafterCounts(self.steps + other.steps, self.proposed + other.proposed, self.accepted + other.accepted)


@dataclass(frozen=True)
class SpeculationCounts:
    """Of one request, or of all since the engine was made.

    steps               in which a draft of a request was verified, each request counted
    proposed, accepted  nodes verified, and those of them that became output
    position_proposed, position_accepted
                        [longest] drafts with a node at position 1.. of a path, and those accepted that far
    saved_s             seconds that plain decoding would have taken longer: tokens gained at the plain time per token,
                        less what the steps took longer than plain ones and what drafting took
    draft_s             the latter
    drafters            by name
    zero_reason         why the last step verified nothing; None where it did
    failure             what a drafter raised last; None where none did
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    position_proposed: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    saved_s: float = 0.0
    draft_s: float = 0.0
    drafters: Mapping[str, DrafterCounts] = field(default_factory=dict)
    zero_reason: ZeroReason | None = None
    failure: str | None = None

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a request gets from a step in which it speculates."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    def after(self, before: SpeculationCounts) -> SpeculationCounts:
        """With what speculation did in an earlier engine added; the last step, and the last failure that there was, are
        this one's."""
        names = {**before.drafters, **self.drafters}
        nothing = DrafterCounts()
        return SpeculationCounts(
            steps=self.steps + before.steps,
            proposed=self.proposed + before.proposed,
            accepted=self.accepted + before.accepted,
            position_proposed=_sums(self.position_proposed, before.position_proposed),
            position_accepted=_sums(self.position_accepted, before.position_accepted),
            saved_s=self.saved_s + before.saved_s,
            draft_s=self.draft_s + before.draft_s,
            drafters={name: self.drafters.get(name, nothing) + before.drafters.get(name, nothing) for name in names},
            zero_reason=self.zero_reason,
            failure=self.failure or before.failure,
        )

    def document(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "steps": self.steps,
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
            "mean_accepted_length": self.mean_accepted_length,
            "position_acceptance": [
                accepted / proposed
                for accepted, proposed in zip(self.position_accepted, self.position_proposed, strict=True)
            ],
            "saved_s": self.saved_s,
            "draft_s": self.draft_s,
            "drafters": {name: asdict(counts) for name, counts in self.drafters.items()},
            "zero_reason": None if self.zero_reason is None else self.zero_reason.value,
            "failure": self.failure,
        }


def _sums(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Position by position, as long as the longer."""
    return tuple(map(sum, zip_longest(some, others, fillvalue=0)))


class Tally:
    """Counts while they grow."""

    def __init__(self) -> None:
        self.saved_s = 0.0
        self.draft_s = 0.0
        self._drafters: dict[str, list[int]] = {}
        self._proposed_to = [0] * (MAX_NODES + 1)  # drafts by their depth
        self._accepted_to = [0] * (MAX_NODES + 1)  # drafts by what was accepted of them

    def add(self, verified: Draft, depth: int, num_accepted: int) -> None:
        """A draft of ``depth`` positions that was verified."""
        counts = self._drafters.setdefault(verified.drafter, [0, 0, 0])
        counts[0] += 1
        counts[1] += len(verified)
        counts[2] += num_accepted
        self._proposed_to[depth] += 1
        self._accepted_to[num_accepted] += 1

    def snapshot(self, zero_reason: ZeroReason | None) -> SpeculationCounts:
        """As it stands. May be called from another thread while counts grow."""
        drafters = {name: DrafterCounts(*counts) for name, counts in self._drafters.copy().items()}
        longest = max((depth for depth, count in enumerate(self._proposed_to) if count), default=0)
        return SpeculationCounts(
            steps=sum(counts.steps for counts in drafters.values()),
            proposed=sum(counts.proposed for counts in drafters.values()),
            accepted=sum(counts.accepted for counts in drafters.values()),
            position_proposed=tuple(sum(self._proposed_to[depth:]) for depth in range(1, longest + 1)),
            position_accepted=tuple(sum(self._accepted_to[depth:]) for depth in range(1, longest + 1)),
            saved_s=self.saved_s,
            draft_s=self.draft_s,
            drafters=drafters,
            zero_reason=zero_reason,
        )
