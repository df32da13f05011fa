"""How much to speculate in each step, so that it is never slower than not to: nothing where nothing pays.

Source: goodput control, TurboSpec (Liu et al. 2024, 2406.14066). Nodes by the probability of their whole path: OPT-Tree
(Wang et al. 2024, 2406.17276) and Sequoia (Chen et al. 2024, 2402.12374).
Notation: a step of n rows without speculation gives R requests a token each in T(n). With the nodes S of all drafts it
gives R + sum of reach(s) in T(n + |S|) + d, where reach is the probability that the node and all before it are taken
and d what drafting took. The best S of each size are the nodes of the largest reach; parents are among them, because
reach falls along a path. So the sizes are compared, and the best is run if its rate is enough above plain decoding's.
Departures: TurboSpec has one length for the whole batch and a linear T; here every request has its own nodes, and T is
the measured table. What is not verified teaches too, as far as the tokens tell, so free drafters need no probes.
Checked by: tests/unit/test_speculate_controller.py, against all subsets of small drafts; test_speculate_simulations.py,
test_speculate_wrong_tables.py and test_speculate_books.py beside it, in simulations and by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.speculate.checks import Check
from paceline.speculate.cost import StepCost
from paceline.speculate.counts import SpeculationCounts, Tally, ZeroReason
from paceline.speculate.draft import Draft
from paceline.speculate.payoff import SMALL_BATCH, START_GAIN, STAY_GAIN, Payoff, gains
from paceline.speculate.states import DrafterState, RequestState, StepState

MAX_COSTLY_LENGTH = 16
"""Longest chain that a drafter which costs time is asked for."""

COSTLY_TRUST = 0.5
"""Power to which a request's odds are believed where the drafter costs time."""

PLAIN_GAP = 64
"""Steps with drafts after which one goes without: some 1 % of the speed."""

DRAFTS_GAP, MAX_DRAFTS_GAP = 256, 4096
"""Steps without drafts after which one verifies some that the table says do not pay, at first and later."""

PLAIN_AGAIN, DRAFTS_AGAIN = 16, 32
"""Gaps while such a step shows that the table is wrong."""

NUM_EXPLORED = 4
"""Nodes that such a step verifies."""

PROMISING = 0.5
"""Tokens that these must be expected to give."""

HIGH_BREAK_EVEN = 0.35
"""Probability of a node that pays from which, in larger batches, most drafts are for nothing."""

NUM_WEAK, WEAK_GAP = 2, 8
"""A request there of which so many drafts began below that probability is asked every so many steps, for little."""

MIN_SHARE = 4
"""Tokens that another request of a larger batch is asked for at least, where so many could pay."""


class Controller:
    """Decides the drafts of each step. In a step: ``begin_step``; for each drafter ``limits`` (nothing else where all
    are 0), then ``choose`` among what it drafted; then ``observe`` for each draft and ``observe_step``, in any order.

    ``max_rows``: most rows with logits that a step may have. Not thread-safe, but for ``counts()``.
    """

    def __init__(self, cost: StepCost, *, max_rows: int) -> None:
        self._cost = cost
        self._payoff = Payoff(cost, max_rows)
        self._max_rows = max_rows
        self._requests: dict[int, RequestState] = {}
        self._drafters: dict[str, DrafterState] = {}
        self._total = Tally()
        self._is_on = False  # whether the last drafts were worth verifying
        self._zero_reason: ZeroReason | None = None  # of the last step as a whole
        self._step = StepState()
        self._num_steps = 0
        self._plain_check = Check(PLAIN_GAP, PLAIN_GAP, PLAIN_AGAIN)
        self._drafts_check = Check(DRAFTS_GAP, MAX_DRAFTS_GAP, DRAFTS_AGAIN)

    def begin_step(self, num_rows: int, num_requests: int, room: int) -> None:
        """A step that runs ``num_rows`` rows anyway, gives ``num_requests`` requests a token and has ``room`` for more
        rows."""
        plain_s = self._cost.seconds(num_rows)
        token_s = plain_s if num_rows == num_requests else self._cost.seconds(num_requests)
        self._step = StepState(
            num_rows,
            num_requests,
            max(0, min(room, self._max_rows - num_rows)),
            plain_s,
            token_s / max(num_requests, 1),
            is_plain=self._plain_check.is_due,
            is_over=False,
        )
        self._num_steps += 1

    def limits(self, drafter: str, is_free: bool, request_ids: Sequence[int]) -> list[int]:
        """How many tokens to ask ``drafter`` for, for each request; 0: do not ask.

        A free drafter is asked for as many as could pay if every one were accepted, in larger batches for some of them;
        another for those that pay by its running acceptance and cost.
        """
        step = self._step
        room = step.room - step.num_chosen
        bounds = self._payoff.bounds(step.num_rows + step.num_chosen, step.num_requests)
        most = min(room, bounds.most_to_stay if self._is_on or not is_free else bounds.most_to_start)
        lengths = [0] * len(request_ids)
        if most > 0 and is_free:
            return self._free_limits(drafter, request_ids, most, bounds.break_even)
        if step.is_plain:
            return lengths
        if most > 0:
            return self._costly_limits(drafter, request_ids, most)
        if room > 0 and self._drafts_check.is_due:
            lengths[self._num_steps % len(lengths)] = min(NUM_EXPLORED, room)
        elif not step.num_chosen:
            self._zero_reason = ZeroReason.DOES_NOT_PAY if room > 0 else ZeroReason.NO_ROOM
        return lengths

    def choose(
        self,
        drafter: str,
        request_ids: Sequence[int],
        drafts: Sequence[Draft | None],
        *,
        spent_s: float = 0.0,
        price_s: float = 0.0,
    ) -> list[Draft | None]:
        """What of the drafts to verify: the nodes, of all requests together, that give the most tokens a second.

        ``spent_s`` went into asking; of it ``price_s`` is what drafts cost, each time. Drafts that are kept whole come
        back as they are. Those that were drawn are: to drop a node for its own token would bend the law of exact
        acceptance.
        """
        step, acceptance = self._step, self._drafter(drafter).acceptance
        requests = [self._request(request_id) for request_id in request_ids]
        num_rows, num_tokens = step.num_rows + step.num_chosen, step.num_requests + step.expected
        break_even = self._payoff.bounds(num_rows, step.num_requests).break_even
        chosen: list[Draft | None] = [None] * len(drafts)
        nodes: list[tuple[float, int, int]] = []
        for which, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            reach = [] if draft is None else acceptance.reach(draft, request.odds.get(drafter, 1.0))
            is_weak = max(reach, default=0.0) < break_even
            request.weak[drafter] = request.weak.get(drafter, 0) + 1 if is_weak else 0
            if draft is not None and draft.q is not None:
                chosen[which] = draft
                num_rows += len(draft)
                num_tokens += sum(reach)
            else:
                nodes += [(p, which, node) for node, p in enumerate(reach) if p > 0.0]
        nodes.sort(reverse=True)
        del nodes[max(0, step.num_rows + step.room - num_rows) :]
        reach = [p for p, _, _ in nodes]
        count = 0 if step.is_plain else self._num_to_verify(reach, num_rows, num_tokens, price_s)
        kept: list[list[int]] = [[] for _ in drafts]
        for _, which, node in nodes[:count]:
            kept[which].append(node)
        chosen = [whole or _keep(draft, keep) for whole, draft, keep in zip(chosen, drafts, kept, strict=True)]
        step.expected = num_tokens - step.num_requests + sum(reach[:count])
        self._note_choice(requests, drafts, chosen, spent_s)
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
        if len(depths) > 1:
            request.weak[proposed.drafter] = 0
        if state.probing.under_way:
            state.probing.outcome(len(depths) > 1)
        request.odds[proposed.drafter] = odds
        if verified is not None:
            self._count(request, verified, verified.num_taken(tokens))

    def observe_step(self, num_rows: int, num_tokens_attended: int, elapsed_s: float, *, teaches: bool = True) -> None:
        """Takes in the time of a step, speculated or not, with the rows that it had in all; see ``StepCost.observe``.
        One that does not ``teach``, because of a prompt beside or because it failed, is charged by the table."""
        step = self._step
        if step.is_over:
            step = self._step = StepState(token_s=step.token_s)
        step.is_over = True
        if step.payers:
            took_s = elapsed_s if teaches else self._cost.seconds(step.num_rows + step.num_chosen)
            longer_s = took_s - step.plain_s
            self._total.saved_s -= longer_s
            for request, num_nodes in step.payers:
                request.tally.saved_s -= longer_s * num_nodes / step.num_chosen
        if not teaches:
            return
        cheaper = -self._cost.observe(num_rows, num_tokens_attended, elapsed_s)
        seen, other = (self._drafts_check, self._plain_check)
        on_purpose = step.is_exploring
        if not step.num_chosen:
            seen, other, on_purpose = other, seen, step.is_plain
        other.passed()
        if on_purpose:
            seen.made(cheaper)
        else:
            seen.came()

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

    def _free_limits(self, drafter: str, request_ids: Sequence[int], most: int, break_even: float) -> list[int]:
        num_requests = self._step.num_requests
        if num_requests <= SMALL_BATCH:
            return [most] * len(request_ids)
        share = min(most, max(MIN_SHARE, 2 * most // num_requests))
        if break_even <= HIGH_BREAK_EVEN:
            return [share] * len(request_ids)
        lengths = [share] * len(request_ids)
        for which, request_id in enumerate(request_ids):
            request = self._requests.get(request_id)
            is_weak = request is not None and request.weak.get(drafter, 0) >= NUM_WEAK
            if is_weak:
                is_its_turn = (self._num_steps + request_id) % WEAK_GAP == 0
                lengths[which] = min(share, MIN_SHARE) if is_its_turn else 0
        return lengths

    def _costly_limits(self, drafter: str, request_ids: Sequence[int], most: int) -> list[int]:
        step, state = self._step, self._drafter(drafter)
        num_rows, num_tokens = step.num_rows + step.num_chosen, step.num_requests + step.expected
        drift = self._cost.drift
        fixed_s, token_s = state.cost.fixed_s / drift, state.cost.per_token_s / drift
        lengths = [0] * len(request_ids)
        longest = min(most, MAX_COSTLY_LENGTH)
        num_nodes = min(longest * len(request_ids), step.room - step.num_chosen)

        def best_count(reach: Sequence[float], depths: Sequence[int], margin: float) -> int:
            drafting_s = [fixed_s + token_s * depth for depth in itertools.accumulate(depths, max)]
            return self._payoff.best_count(reach, num_rows, num_tokens, margin, drafting_s=drafting_s)

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
        if count > 0:
            state.probing.pays()
            for _, _, which in nodes[:count]:
                lengths[which] += 1
        elif state.probing.is_due(too_dear=too_dear):
            self._age(drafter, request_ids)
            lengths[state.probing.num_probes % len(lengths)] = 1
        elif not step.num_chosen:
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

    def _num_to_verify(self, reach: Sequence[float], num_rows: int, num_tokens: float, price_s: float) -> int:
        step = self._step
        start_gain, stay_gain = gains(step.num_requests)
        margin = stay_gain if self._is_on else start_gain
        sunk_s = 0.0
        if price_s > 0.0:
            # A token is worth no more than it takes without drafting, however long that took.
            sunk_s = min(price_s / self._cost.drift, self._payoff.gain_s(reach, num_rows, num_tokens))
        count = self._payoff.best_count(reach, num_rows, num_tokens, margin, sunk_s=sunk_s)
        if count == 0 and reach and self._drafts_check.is_due:
            if sum(reach[:NUM_EXPLORED]) >= PROMISING:
                step.is_exploring = True
                return min(NUM_EXPLORED, len(reach))
            if price_s > 0.0:
                self._drafts_check.made(0.0)  # not to be paid for at every step
        return count

    def _note_choice(
        self,
        requests: Sequence[RequestState],
        drafts: Sequence[Draft | None],
        chosen: Sequence[Draft | None],
        spent_s: float,
    ) -> None:
        """Charges for drafting, keeps who is to be charged for verifying, and why nothing was chosen."""
        step = self._step
        num_rows = step.num_rows + step.num_chosen
        could_pay = self._payoff.bounds(num_rows, step.num_requests).most_to_stay > 0
        zero = ZeroReason.ACCEPTANCE_TOO_LOW if could_pay else ZeroReason.DOES_NOT_PAY
        zero = zero if step.room > step.num_chosen else ZeroReason.NO_ROOM
        num_drafted = sum([len(draft) for draft in drafts if draft is not None])
        self._total.saved_s -= spent_s
        self._total.draft_s += spent_s
        payers = step.payers = step.payers or []
        for request, draft, choice in zip(requests, drafts, chosen, strict=True):
            request.zero_reason = None if choice is not None else ZeroReason.NO_MATCH if draft is None else zero
            part = 1.0 / len(requests) if not num_drafted else 0.0 if draft is None else len(draft) / num_drafted
            request.tally.saved_s -= part * spent_s
            request.tally.draft_s += part * spent_s
            if choice is not None:
                payers.append((request, len(choice)))
                step.num_chosen += len(choice)
        if num_drafted and not step.is_plain:
            self._is_on = step.num_chosen > 0 and not step.is_exploring
        self._zero_reason = None if step.num_chosen else zero if num_drafted else ZeroReason.NO_MATCH

    def _count(self, request: RequestState, verified: Draft, num_accepted: int) -> None:
        depth = max(verified.depths())
        for tally in (request.tally, self._total):
            tally.add(verified, depth, num_accepted)
            tally.saved_s += num_accepted * self._step.token_s

    def _request(self, request_id: int) -> RequestState:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = RequestState()
        return request

    def _drafter(self, name: str) -> DrafterState:
        state = self._drafters.get(name)
        if state is None:
            state = self._drafters[name] = DrafterState()
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
