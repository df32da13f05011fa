"""How much to speculate in each step, so that it is never slower than not to: nothing where nothing pays.

Source: goodput control, TurboSpec (Liu et al. 2024, 2406.14066). Nodes by the probability of their whole path: OPT-Tree
(Wang et al. 2024, 2406.17276) and Sequoia (Chen et al. 2024, 2402.12374).
Notation: a step of n rows without speculation gives R requests a token each in T(n). With the nodes S of all drafts it
gives R + sum of reach(s) in T(n + |S|) + d, where reach is the probability that the node and all before it are taken
and d what drafting took. The best S of each size are the nodes of the largest reach; parents are among them, because
reach falls along a path. So the sizes are compared, and the best is run if its rate is enough above plain decoding's.
Departures: TurboSpec has one length for the whole batch and a linear T; here every request has its own nodes, and T is
the measured table. What is not verified teaches too, as far as the tokens tell, so free drafters need no probes.
Checked by: tests/unit/test_speculate_controller.py: against all subsets of small drafts, and in simulations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.speculate.acceptance import Acceptance
from paceline.speculate.cost import StepCost
from paceline.speculate.counts import SpeculationCounts, Tally, ZeroReason
from paceline.speculate.draft import MAX_NODES, Draft
from paceline.speculate.spending import DraftCost, Probing

START_GAIN, STAY_GAIN = 1.05, 1.02
"""Expected rate over plain decoding's from which speculation begins, and from which it goes on: estimates err."""

MAX_COSTLY_LENGTH = 16
"""Longest chain that a drafter which costs time is asked for."""

COSTLY_TRUST = 0.5
"""Power to which a request's odds are believed where the drafter costs time."""

MAX_LIMITS = 1024
"""Batches for which the largest length that could pay is kept."""


class _Request:
    """A running request: its odds against each drafter's average, and its counts."""

    __slots__ = ("odds", "tally", "zero_reason")

    def __init__(self) -> None:
        self.odds: dict[str, float] = {}
        self.tally = Tally()
        self.zero_reason: ZeroReason | None = None


class _DrafterState:
    __slots__ = ("acceptance", "cost", "probing")

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.cost = DraftCost()
        self.probing = Probing()


class Controller:
    """Decides the drafts of each step. In a step: ``limits`` for a drafter (nothing else where all are 0), ``choose``
    among what was drafted, then ``observe`` for each draft and ``observe_step`` once, in any order.

    ``max_rows``: most rows with logits that a step may have. Not thread-safe.
    """

    def __init__(self, cost: StepCost, *, max_rows: int) -> None:
        self._cost = cost
        self._max_rows = max_rows
        self._requests: dict[int, _Request] = {}
        self._drafters: dict[str, _DrafterState] = {}
        self._total = Tally()
        self._is_on = False  # whether the last drafts were worth verifying
        self._zero_reason: ZeroReason | None = None  # of the last step as a whole
        self._most: dict[tuple[int, int], int] = {}
        self._most_version = cost.version
        # Of the step under way: plain seconds, seconds of drafting, requests and their parts of both.
        self._plain_s = self._draft_s = self._token_s = 0.0
        self._parts: list[tuple[_Request, float]] = []
        self._is_speculating = False

    def limits(
        self, drafter: str, is_free: bool, request_ids: Sequence[int], num_rows: int, num_requests: int
    ) -> list[int]:
        """How many tokens to ask ``drafter`` for, for each request; 0: do not ask.

        The step runs ``num_rows`` rows anyway and gives ``num_requests`` requests a token. A free drafter is asked for
        as many as could pay if every one were accepted; another for those that pay by its running acceptance and cost.
        """
        most = self._most_that_could_pay(num_rows, num_requests)
        if most > 0 and is_free:
            self._zero_reason = None
            return [most] * len(request_ids)
        if most > 0:
            return self._costly_limits(drafter, request_ids, num_rows, num_requests, most)
        self._zero_reason = ZeroReason.NO_ROOM if num_rows >= self._max_rows else ZeroReason.DOES_NOT_PAY
        return [0] * len(request_ids)

    def choose(
        self,
        request_ids: Sequence[int],
        drafts: Sequence[Draft | None],
        num_rows: int,
        num_requests: int,
        draft_cost_s: float = 0.0,
    ) -> list[Draft | None]:
        """What of the drafts to verify: the nodes, of all requests together, that give the most tokens a second.

        ``draft_cost_s`` has been spent on them already. Drafts that are kept whole come back as they are.
        """
        self._plain_s = self._cost.seconds(num_rows)
        self._token_s = self._plain_s / max(num_requests, 1)
        self._draft_s = draft_cost_s
        requests = [self._request(request_id) for request_id in request_ids]
        nodes: list[tuple[float, int, int]] = []
        for which, draft in enumerate(drafts):
            if draft is not None:
                odds = requests[which].odds.get(draft.drafter, 1.0)
                reach = self._drafter(draft.drafter).acceptance.reach(draft, odds)
                nodes += [(p, which, node) for node, p in enumerate(reach) if p > 0.0]
        nodes.sort(reverse=True)
        del nodes[max(0, self._max_rows - num_rows) :]
        margin = STAY_GAIN if self._is_on else START_GAIN
        sunk_s = draft_cost_s / self._cost.drift
        count = self._best_count([p for p, _, _ in nodes], num_rows, num_requests, margin, sunk_s=sunk_s)
        kept: list[list[int]] = [[] for _ in drafts]
        for _, which, node in nodes[:count]:
            kept[which].append(node)
        chosen = [_keep(draft, keep) for draft, keep in zip(drafts, kept, strict=True)]
        self._note_choice(requests, drafts, chosen, num_rows, num_requests)
        return chosen

    def observe(self, request_id: int, proposed: Draft, verified: Draft | None, tokens: Sequence[int]) -> None:
        """Learns from a step: ``proposed`` was drafted, ``verified`` of it ran, and the target produced ``tokens``, one
        more than it accepted. Every node whose parent path agrees with ``tokens`` has a known outcome, verified or not.
        """
        state, request = self._drafter(proposed.drafter), self._request(request_id)
        odds = request.odds.get(proposed.drafter, 1.0)
        depths = {0: 0}  # of the rows that agree
        for row, (parent, token, confidence) in enumerate(
            zip(proposed.parents, proposed.tokens, proposed.confidence, strict=True), 1
        ):
            depth = depths.get(parent)
            if depth is not None and depth < len(tokens):
                taken = token == tokens[depth]
                odds = state.acceptance.learn(confidence, depth + 1, taken, odds)
                if taken:
                    depths[row] = depth + 1
        if len(depths) > len(proposed):
            state.acceptance.fade(len(proposed) + 1)
        if state.probing.under_way:
            state.probing.outcome(len(depths) > 1)
        request.odds[proposed.drafter] = odds
        if verified is not None:
            self._count(request, verified, max(0, len(tokens) - 1))

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float) -> None:
        """Takes in the time of every step, speculated or not, with the rows that it had in all; see
        ``StepCost.observe``."""
        self._cost.observe(num_rows, num_tokens_attended, elapsed_s)
        if self._draft_s or self._parts:
            self._charge(elapsed_s)

    def observe_draft_cost(self, drafter: str, longest: int, elapsed_s: float) -> None:
        """Seconds that a drafter that is not free took for drafts of which the longest has ``longest`` >= 1 tokens."""
        self._drafter(drafter).cost.observe(longest, elapsed_s)

    def finish(self, request_id: int) -> SpeculationCounts:
        """The request has ended: its last counts; what was learnt from it alone goes."""
        counts = self.counts(request_id)
        self._requests.pop(request_id, None)
        return counts

    def counts(self, request_id: int | None = None) -> SpeculationCounts:
        """Of one request, or of all since the beginning."""
        if request_id is None:
            return self._total.snapshot(self._zero_reason)
        request = self._requests.get(request_id)
        if request is None:
            return SpeculationCounts(zero_reason=self._zero_reason)
        # What keeps the whole step from speculating was found without looking at requests.
        return request.tally.snapshot(self._zero_reason or request.zero_reason)

    def _most_that_could_pay(self, num_rows: int, num_requests: int) -> int:
        """Most nodes of the step that would be worth it if all of them were taken."""
        if self._most_version != self._cost.version or len(self._most) >= MAX_LIMITS:
            self._most.clear()
            self._most_version = self._cost.version
        most = self._most.get((num_rows, num_requests))
        if most is None:
            room = max(0, min(MAX_NODES, self._max_rows - num_rows))
            shape = self._cost.shape(num_rows + room)
            plain = num_requests / shape[num_rows] if num_requests > 0 else float("inf")
            pays = (k for k in range(room, 0, -1) if num_requests + k >= STAY_GAIN * plain * shape[num_rows + k])
            most = self._most[num_rows, num_requests] = next(pays, 0)
        return most

    def _costly_limits(
        self, drafter: str, request_ids: Sequence[int], num_rows: int, num_requests: int, most: int
    ) -> list[int]:
        state = self._drafter(drafter)
        drift = self._cost.drift
        fixed_s, token_s = state.cost.fixed_s / drift, state.cost.per_token_s / drift
        lengths = [0] * len(request_ids)
        longest = min(most, MAX_COSTLY_LENGTH)
        num_nodes = min(longest * len(request_ids), self._max_rows - num_rows)

        def best_count(reach: Sequence[float], depths: Sequence[int], margin: float) -> int:
            drafting_s = [fixed_s + token_s * depth for depth in itertools.accumulate(depths, max)]
            return self._best_count(reach, num_rows, num_requests, margin, drafting_s=drafting_s)

        all_right = [1 + node // len(request_ids) for node in range(num_nodes)]
        too_dear = not best_count([1.0] * num_nodes, all_right, STAY_GAIN)
        count = 0
        nodes: list[tuple[float, int, int]] = []
        if not too_dear:
            for which, request_id in enumerate(request_ids):
                request = self._requests.get(request_id)
                odds = 1.0 if request is None else request.odds.get(drafter, 1.0)
                # Less of what the last tokens say: they may be chance, and who is not asked cannot correct it.
                chain = state.acceptance.chain(longest, odds**COSTLY_TRUST)
                nodes += [(p, -depth, which) for depth, p in enumerate(chain, 1)]
            nodes.sort(reverse=True)
            del nodes[num_nodes:]
            margin = STAY_GAIN if state.probing.active else START_GAIN
            count = best_count([p for p, _, _ in nodes], [-depth for _, depth, _ in nodes], margin)
        self._zero_reason = None
        if count > 0:
            state.probing.pays()
            for _, _, which in nodes[:count]:
                lengths[which] += 1
        elif state.probing.is_due(too_dear=too_dear):
            self._age(drafter, request_ids)
            lengths[state.probing.num_probes % len(lengths)] = 1
        else:
            self._zero_reason = ZeroReason.DOES_NOT_PAY if too_dear else ZeroReason.ACCEPTANCE_TOO_LOW
        return lengths

    def _age(self, drafter: str, request_ids: Sequence[int]) -> None:
        """What is known of a drafter that was not asked for a while counts for less."""
        self._drafters[drafter].acceptance.age()
        self._drafters[drafter].cost.age()
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and drafter in request.odds:
                request.odds[drafter] **= COSTLY_TRUST

    def _best_count(
        self,
        reach: Sequence[float],
        num_rows: int,
        num_requests: int,
        margin: float,
        *,
        sunk_s: float = 0.0,
        drafting_s: Sequence[float] | None = None,
    ) -> int:
        """How many of the nodes, ``reach`` falling, give the highest rate; 0 where it is not ``margin`` times that of
        none. Seconds of drafting, at the table's speed: ``sunk_s`` have been spent; ``drafting_s[i]`` will be where
        the count is i + 1."""
        shape = self._cost.shape(num_rows + len(reach))
        best, count = margin * num_requests / (shape[num_rows] + sunk_s), 0
        tokens, size = float(num_requests), num_rows
        spent_s = sunk_s
        for node, p in enumerate(reach):
            tokens += p
            size += 1
            if drafting_s is not None:
                spent_s = sunk_s + drafting_s[node]
            if tokens > best * (shape[size] + spent_s):
                best, count = tokens / (shape[size] + spent_s), size - num_rows
        return count

    def _note_choice(
        self,
        requests: Sequence[_Request],
        drafts: Sequence[Draft | None],
        chosen: Sequence[Draft | None],
        num_rows: int,
        num_requests: int,
    ) -> None:
        """Keeps why nothing was chosen, and who is to be charged for the step."""
        could_pay = self._most_that_could_pay(num_rows, num_requests) > 0
        no_room = num_rows >= self._max_rows
        zero = ZeroReason.ACCEPTANCE_TOO_LOW if could_pay else ZeroReason.DOES_NOT_PAY
        zero = ZeroReason.NO_ROOM if no_room else zero
        num_chosen = sum(len(draft) for draft in chosen if draft is not None)
        num_drafted = sum(len(draft) for draft in drafts if draft is not None)
        self._parts = []
        self._zero_reason = None
        for request, draft, choice in zip(requests, drafts, chosen, strict=True):
            request.zero_reason = None if choice is not None else ZeroReason.NO_MATCH if draft is None else zero
            payer = choice if num_chosen else draft
            if payer is not None:
                self._parts.append((request, len(payer) / (num_chosen or num_drafted)))
        self._is_speculating = num_chosen > 0
        if num_drafted:
            self._is_on = self._is_speculating
        if not num_chosen:
            self._zero_reason = zero if num_drafted else ZeroReason.NO_MATCH

    def _charge(self, elapsed_s: float) -> None:
        """What the step took longer than a plain one, and drafting."""
        longer_s = self._draft_s + (elapsed_s - self._plain_s if self._is_speculating else 0.0)
        self._total.saved_s -= longer_s
        self._total.draft_s += self._draft_s
        for request, part in self._parts:
            request.tally.saved_s -= part * longer_s
            request.tally.draft_s += part * self._draft_s
        self._draft_s, self._parts = 0.0, []

    def _count(self, request: _Request, verified: Draft, num_accepted: int) -> None:
        depth = max(verified.depths())
        for tally in (request.tally, self._total):
            tally.add(verified, depth, num_accepted)
            tally.saved_s += num_accepted * self._token_s

    def _request(self, request_id: int) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        return request

    def _drafter(self, name: str) -> _DrafterState:
        state = self._drafters.get(name)
        if state is None:
            state = self._drafters[name] = _DrafterState()
        return state


def _keep(draft: Draft | None, nodes: list[int]) -> Draft | None:
    """The draft of these nodes, in any order; None for none."""
    count = len(nodes)
    if draft is None or count == 0:
        return None
    if count == len(draft):
        return draft
    if max(nodes) >= count:
        return draft.keep(sorted(nodes))
    # The beginning, as always of a chain, is cut off in a third of the time.
    q = draft.q and draft.q[:count]
    return Draft(draft.tokens[:count], draft.parents[:count], draft.confidence[:count], draft.drafter, q)
