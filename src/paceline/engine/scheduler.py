"""Which rows of which requests each step computes: one rule, close the gap between tokens and computed tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from paceline.config import PAGE_TOKENS
from paceline.engine.request import Request
from paceline.engine.waiting import WaitingQueue
from paceline.errors import KVCapacityError
from paceline.kv.layout import pages_for
from paceline.kv.manager import KVManager
from paceline.speculate.draft import Draft

ADMISSION_WINDOW = 64
"""Waiting requests among which the one with the longest cached prefix is sought."""

MAX_PASSED = 16
"""A request that so many later ones have passed is the next."""

MAX_LOADS = 32
"""Pages that a step reads back from disk while somebody watches an answer: about 0.6 ms each for SmolLM2's."""


@dataclass
class Schedule:
    """One step.

    requests  in the order of the plan, each with num_scheduled >= 1
    admitted  that have just become running ones;  failed  that cannot go on
    """

    requests: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)

    def decodes_and_prompt_rows(self) -> tuple[int, int]:
        """How many requests decode, with or without a draft, and the rows of the others."""
        num_decodes = num_prompt_rows = 0
        for request in self.requests:
            if request.num_scheduled == 1 or request.draft is not None:
                num_decodes += 1
            else:
                num_prompt_rows += request.num_scheduled
        return num_decodes, num_prompt_rows


@dataclass
class CacheCounts:
    """Tokens that requests looked up in the prefix cache when they first ran, those found, and those that they
    therefore did not compute. The last token is always computed, and so is what log-probabilities are wanted of."""

    query: int = 0
    hit: int = 0
    saved: int = 0


class Scheduler:
    """Owns the waiting and running requests and their page tables. ``kv.finish_step`` is due after each step.

    A step takes, within ``token_budget`` rows and ``max_outputs`` outputs: running requests that lack one row (decode),
    then running ones that lack more (prefill in chunks), then waiting ones. Of those it is the turn of the share with
    the fewest running requests; within it the one with the longest cached prefix comes first, of equals the one that
    came first; one that was preempted, or passed by ``MAX_PASSED`` others, before all. A waiting request is admitted
    when its tokens so far fit in pages that are free or only cached, and one more page is left for each running
    request: it can make progress, then. It gets all these pages at once, so that a prefill never stalls half way.

    When a decode needs a page and none is free, cached pages go first. Then the running request that loses the least
    computed work, not counting what others share (the latest of equals), gives its pages up to the cache and goes back
    to the front of its line; what of them survives there is not computed again. The request with the most work is
    never the one, so the engine always goes on. A request that outgrows the whole pool fails alone.
    """

    def __init__(self, kv: KVManager, *, max_batch: int, token_budget: int, max_outputs: int) -> None:
        assert 1 <= max_batch <= min(token_budget, max_outputs)
        self.kv = kv
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_outputs = max_outputs
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.cache = CacheCounts()
        self.preemptions = 0
        self.wasted_tokens = 0
        self._no_room: tuple[int, int, int] | None = None  # what there was when nobody could be admitted

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def remove(self, request: Request, *, keep: bool = True) -> None:
        """Forgets a request that ended; its pages are free, or cached where ``keep`` says that they are right. The
        request must be queued or running."""
        if request.slot is None:
            self.waiting.remove(request)
            self._count_waste(request, request.num_lost)
        else:
            self.running.remove(request)
            self._free(request, keep=keep)

    def plan(
        self, max_prompt_rows: Callable[[int, int], int | None] = lambda num_decodes, num_prompts: None
    ) -> Schedule:
        """The next step. Beside answers that somebody watches it has at most as many rows of prompts as
        ``max_prompt_rows`` says for the numbers of decodes and of prompts that are read or could be (None: any number).
        Empty only when nothing waits or runs, or all that did has failed."""
        schedule = Schedule()
        if self.waiting:
            self._take_back_draft_pages()
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
            if capacity[slot] < num_tokens:
                if not self._make_room(request, schedule):
                    continue
            elif request.num_computed // PAGE_TOKENS > request.num_published:  # a draft has got its pages before
                self._publish(request, slot)
            request.num_scheduled = request.num_outputs = 1
            schedule.requests.append(request)
        # Preemption may have taken decodes out again, so what is left is counted only here.
        budget -= len(schedule.requests)
        outputs -= len(schedule.requests)
        is_watched = bool(prefills or self.waiting) and any(request.streaming for request in schedule.requests)
        if is_watched:
            max_rows = max_prompt_rows(len(schedule.requests), len(prefills) + self._num_admissible)
            budget = budget if max_rows is None else min(budget, max_rows)
        queued = iter(prefills)
        while budget > 0:
            candidate = next(queued, None) or self._admit(schedule, MAX_LOADS if is_watched else None)
            if candidate is None:
                break
            if candidate.slot is None:  # preempted by a decode above
                continue
            rows = candidate.schedule(budget, outputs)
            if rows > 0:
                self.kv.slide(candidate.slot, candidate.num_computed)
                self.kv.publish(candidate.slot, candidate.tokens, candidate.num_computed + rows)
                schedule.requests.append(candidate)
                budget -= rows
                outputs -= candidate.num_outputs
        return schedule

    @property
    def _num_admissible(self) -> int:
        """Waiting requests that the batch has places for, unless pages were lacking a step ago and still are."""
        return 0 if self._room == self._no_room else min(len(self.waiting), self.max_batch - len(self.running))

    @property
    def _room(self) -> tuple[int, int, int]:
        """What admission depends on: free pages, running and waiting requests."""
        return self.kv.num_available, len(self.running), len(self.waiting)

    def room_for_drafts(self, schedule: Schedule) -> int:
        """Rows, each with an output, that may be added to a step."""
        rows = sum([request.num_scheduled for request in schedule.requests])
        outputs = sum([request.num_outputs for request in schedule.requests])
        return min(self.token_budget - rows, self.max_outputs - outputs)

    def add_draft(self, request: Request, draft: Draft) -> None:
        """Has a decoding request of the step verify what of ``draft`` finds pages: the step must have room for it.

        Only pages that no running request may need for its own next token are taken.
        """
        assert request.slot is not None
        assert request.num_scheduled == request.num_outputs == 1
        num_tokens = len(request.tokens)
        draft = draft.in_branches()
        depths = draft.depths()
        starts = [*draft.branch_starts(), len(draft) + 1]
        num_rows = min(starts[1] - 1, self._depth_that_fits(request.slot, num_tokens, starts[1] - 1)) + 1
        if num_rows == starts[1]:  # all of the first branch; the others have pages of their own
            for end in starts[2:]:
                deepest = num_tokens + depths[end - 2]
                count = pages_for(deepest) - request.num_computed // PAGE_TOKENS
                fork = None
                if self.kv.num_available - count >= len(self.running):
                    fork = self.kv.fork(request.slot, request.num_computed, deepest)
                if fork is None:
                    break
                request.forks.append(fork)
                num_rows = end
        if num_rows > 1:
            request.draft = draft if num_rows == len(draft) + 1 else draft.keep(range(num_rows - 1))
            request.num_scheduled = request.num_outputs = num_rows

    def _depth_that_fits(self, slot: int, num_tokens: int, depth: int) -> int:
        """How many tokens beyond ``num_tokens``, up to ``depth``, a sequence has or gets pages for."""
        needed = pages_for(num_tokens + depth) - self.kv.capacity[slot] // PAGE_TOKENS
        spare = self.kv.num_available - len(self.running)
        if 0 < needed <= spare:
            self.kv.grow(slot, num_tokens + depth)
        return self.kv.capacity[slot] - num_tokens

    def abandon(self, schedule: Schedule) -> None:
        """Undoes a step that failed, but for its requests, which must be removed without keeping their pages.

        What was published is computed by nobody now, so others that were to share it go back to the queue.
        """
        self.kv.discard_step()
        for request in reversed(schedule.admitted):
            if request not in schedule.requests:
                self.running.remove(request)
                self._free(request, keep=False)
                self.waiting.appendleft(request)

    def _admit(self, schedule: Schedule, max_loads: int | None) -> Request | None:
        """Moves a waiting request to the running ones if there is room, past those that can never run."""
        while self.waiting and len(self.running) < self.max_batch:
            room = self._room
            if self.running and room == self._no_room:
                return None  # as before: looking again would cost as much as last time
            line = self.waiting.next_line(self.running)
            at = self._next_of(line)
            request = line[at]
            if pages_for(len(request.tokens)) > self.kv.pool.num_pages:
                self.waiting.remove(request)
                self._count_waste(request, request.num_lost)
                self._fail(request, schedule)
                continue
            opened = self.kv.open(
                request.domain,
                request.key,
                limit=request.num_reusable,
                reserve=len(self.running),
                max_loads=max_loads,
            )
            if opened is None:
                self._no_room = None if self.kv.is_loading else room
                return None
            for passed in islice(line, at):
                passed.num_passed += 1
            self.waiting.admit(request)
            request.slot = opened.slot
            request.num_computed = opened.num_cached
            if request.num_preemptions == 0:
                request.num_cached = opened.num_cached
                self.cache.query += len(request.tokens)
                self.cache.hit += opened.num_found
                self.cache.saved += opened.num_cached
            self._count_waste(request, max(0, request.num_lost - opened.num_cached))
            self.running.append(request)
            schedule.admitted.append(request)
            return request
        return None

    def _next_of(self, line: deque[Request]) -> int:
        """The place in a line of the request to admit next."""
        if len(line) == 1 or not self.kv.prefix_cache:
            return 0
        window = list(islice(line, ADMISSION_WINDOW))
        for at, request in enumerate(window):
            if request.num_preemptions or request.num_passed >= MAX_PASSED:
                return at
        lengths = [self.kv.lookup(request.domain, request.key) for request in window]
        return lengths.index(max(lengths))

    def _make_room(self, request: Request, schedule: Schedule) -> bool:
        """Grows a request's pages as its tokens need, at others' cost if it must; False when it runs no longer."""
        assert request.slot is not None
        num_tokens = len(request.tokens)
        if pages_for(num_tokens) > self.kv.pool.num_pages:
            self.running.remove(request)
            self._free(request)
            self._fail(request, schedule)
            return False
        self._publish(request, request.slot)
        while not self.kv.grow(request.slot, num_tokens):
            if self._take_back_draft_pages():
                continue
            victim = min(self.running, key=lambda r: (self._work_to_lose(r), -r.request_id))
            self._preempt(victim)
            if victim is request:
                return False
            if victim in schedule.requests:
                schedule.requests.remove(victim)
        return True

    def _take_back_draft_pages(self) -> bool:
        """Frees what running requests hold beyond their tokens; whether there was any."""
        found = False
        for request in self.running:
            slot = request.slot
            if slot is not None and self.kv.capacity[slot] - len(request.tokens) >= PAGE_TOKENS:
                self.kv.shrink(slot, len(request.tokens))
                found = True
        return found

    def _publish(self, request: Request, slot: int) -> None:
        """Puts the whole pages of a decoding request into the tree, and gives up those that it sees no more.

        Before prefills of the step publish theirs, which it may fail to compute: nothing computed may hang on those.
        """
        self.kv.publish(slot, request.tokens, request.num_computed, is_computed=True)
        self.kv.slide(slot, request.num_computed)
        request.num_published = request.num_computed // PAGE_TOKENS

    def _work_to_lose(self, request: Request) -> int:
        """Computed tokens of a running request that no other running request has in common with it."""
        assert request.slot is not None
        return min(request.num_computed, self.kv.num_own_tokens(request.slot))

    def _preempt(self, victim: Request) -> None:
        self.preemptions += 1
        victim.num_preemptions += 1
        victim.num_lost = victim.num_computed
        self.running.remove(victim)
        self._free(victim)
        self.waiting.appendleft(victim)

    def _count_waste(self, request: Request, num_tokens: int) -> None:
        request.num_wasted += num_tokens
        request.num_lost = 0
        self.wasted_tokens += num_tokens

    def _fail(self, request: Request, schedule: Schedule) -> None:
        request.error = KVCapacityError(len(request.tokens), self.kv.num_pool_tokens)
        schedule.failed.append(request)

    def _free(self, request: Request, *, keep: bool = True) -> None:
        assert request.slot is not None
        self.kv.close(request.slot, request.tokens, request.num_computed if keep else 0)
        request.slot = None
        request.num_computed = 0
        request.num_scheduled = request.num_outputs = 0
        request.num_published = 0
        request.draft = None
        request.forks.clear()

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
