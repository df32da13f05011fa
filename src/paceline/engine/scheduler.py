"""Which rows of which requests each step computes: one rule, close the gap between tokens and computed tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.engine.request import Request
from paceline.errors import KVCapacityError
from paceline.kv.layout import pages_for
from paceline.kv.manager import KVManager


@dataclass
class Schedule:
    """One step.

    requests  in the order of the plan, each with num_scheduled >= 1
    admitted  that have just become running ones;  failed  that cannot go on
    """

    requests: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the waiting and running requests and their page tables.

    A step takes, within ``token_budget`` rows and ``max_outputs`` outputs: running requests that lack one row (decode),
    then running ones that lack more (prefill in chunks), then waiting ones, first come first served. A waiting request
    is admitted when its tokens so far fit in free pages and one more page is free for each running request; it gets all
    these pages at once, so that a prefill never stalls half way.

    When a decode needs a page and none is free, the running request that loses the least computed work (the latest of
    equals) gives its pages up and goes back to the front of the queue; its tokens are computed again later, to the same
    values. The request with the most work is never the one, so the engine always goes on. A request that outgrows the
    whole pool fails alone.
    """

    def __init__(self, kv: KVManager, *, max_batch: int, token_budget: int, max_outputs: int) -> None:
        assert 1 <= max_batch <= min(token_budget, max_outputs)
        self.kv = kv
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_outputs = max_outputs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.wasted_tokens = 0

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request that ended, and frees its pages. The request must be queued or running."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._free(request)

    def plan(self) -> Schedule:
        """The next step. Empty only when nothing waits or runs, or all that did has failed."""
        schedule = Schedule()
        budget, outputs = self.token_budget, self.max_outputs
        prefills: list[Request] = []
        capacity = self.kv.capacity
        for request in list(self.running):
            slot = request.slot
            if slot is None:  # preempted or failed for a request before it
                continue
            num_tokens = len(request.tokens)
            if num_tokens - request.num_computed > 1:
                prefills.append(request)
                continue
            if capacity[slot] < num_tokens and not self._make_room(request, schedule):
                continue
            request.num_scheduled = request.num_outputs = 1
            schedule.requests.append(request)
        # Preemption may have taken decodes out again, so what is left is counted only here.
        budget -= len(schedule.requests)
        outputs -= len(schedule.requests)
        queued = iter(prefills)
        while budget > 0:
            candidate = next(queued, None) or self._admit(schedule)
            if candidate is None:
                break
            if candidate.slot is None:  # preempted by a decode above
                continue
            rows = candidate.schedule(budget, outputs)
            if rows > 0:
                schedule.requests.append(candidate)
                budget -= rows
                outputs -= candidate.num_outputs
        return schedule

    def _admit(self, schedule: Schedule) -> Request | None:
        """Moves the first waiting request to the running ones if there is room, past those that can never run."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            num_tokens = len(request.tokens)
            needed = pages_for(num_tokens)
            if needed > self.kv.pool.num_pages:
                self._fail(self.waiting.popleft(), schedule)
                continue
            if needed + len(self.running) > self.kv.pool.num_free:
                return None
            self.waiting.popleft()
            request.slot = self.kv.open()
            grown = self.kv.grow(request.slot, num_tokens)
            assert grown
            self.running.append(request)
            schedule.admitted.append(request)
            return request
        return None

    def _make_room(self, request: Request, schedule: Schedule) -> bool:
        """Grows a request's pages as its tokens need, at others' cost if it must; False when it runs no longer."""
        assert request.slot is not None
        num_tokens = len(request.tokens)
        if pages_for(num_tokens) > self.kv.pool.num_pages:
            self.running.remove(request)
            self._free(request)
            self._fail(request, schedule)
            return False
        while not self.kv.grow(request.slot, num_tokens):
            victim = min(self.running, key=lambda r: (r.num_computed, -r.request_id))
            self._preempt(victim)
            if victim is request:
                return False
            if victim in schedule.requests:
                schedule.requests.remove(victim)
        return True

    def _preempt(self, victim: Request) -> None:
        self.preemptions += 1
        self.wasted_tokens += victim.num_computed
        self.running.remove(victim)
        self._free(victim)
        self.waiting.appendleft(victim)

    def _fail(self, request: Request, schedule: Schedule) -> None:
        request.error = KVCapacityError(len(request.tokens), self.kv.num_pool_tokens)
        schedule.failed.append(request)

    def _free(self, request: Request) -> None:
        assert request.slot is not None
        self.kv.close(request.slot)
        request.slot = None
        request.num_computed = 0
        request.num_scheduled = request.num_outputs = 0

    def check(self) -> None:
        """Asserts that requests, slots and pages agree."""
        slots = {request.slot for request in self.running}
        assert None not in slots, "a running request has no slot"
        assert len(slots) == len(self.running) <= self.max_batch, "running requests need slots of their own"
        for request in self.running:
            assert request.slot is not None
            assert request.num_computed <= self.kv.capacity[request.slot], "computed tokens lie beyond the pages"
            assert request.num_computed < len(request.tokens), "a running request has nothing to compute"
        for request in self.waiting:
            assert request.slot is None, "a waiting request has a slot"
            assert request.num_computed == 0, "a waiting request has computed tokens"
        assert sum(map(bool, self.kv.capacity)) == len(self.running), "pages without a running request"
        self.kv.check()
