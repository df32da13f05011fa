"""Where a draft model's keys and values lie: in pages of its own, or in the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.executors.base import Executor
from paceline.kv.layout import pages_for
from paceline.kv.manager import KVManager, Opened, token_key
from paceline.speculate.draft import Context


@dataclass(frozen=True)
class Place:
    """Where a request's rows go: the row ``slot`` of the page table.

    num_computed  tokens whose keys and values are there, fewer than the request has
    num_room      tokens that its pages hold, at least as many as the request has
    """

    slot: int
    num_computed: int
    num_room: int


class DraftPages(Protocol):
    """The pages of one draft executor. A call of ``propose`` is ``begin``, then steps, then ``keep`` for each request
    that has got a place, or ``abandon``. A step is any calls of ``place`` and ``compute``, a run, ``finish_step``."""

    @property
    def table(self) -> NDArray[np.int32]:
        """Page tables [sequences, p] i32 by slot, as a plan needs them."""
        ...

    @property
    def page_copies(self) -> Sequence[tuple[int, int]]:
        """(source, destination) of pages that the step under way must copy first."""
        ...

    def begin(self, contexts: Sequence[Context]) -> None:
        """These requests are asked for: none that has got its place loses it until the next call."""
        ...

    def gap(self, context: Context) -> int:
        """Rows of a request that are not computed, at least 1; all of one that has no place, though some of them may be
        found when it gets one."""
        ...

    def place(self, context: Context, num_tokens: int) -> Place | None:
        """Pages for a request's tokens and, as far as they can be had, for up to ``num_tokens``. None without room."""
        ...

    def compute(self, context: Context, num_computed: int) -> None:
        """The step under way computes a placed request's rows up to ``num_computed``. Of steps that compute drafted
        tokens only it need not be told."""
        ...

    def finish_step(self) -> None:
        """The step has run."""
        ...

    def keep(self, context: Context, num_known: int, ahead: Sequence[int]) -> None:
        """The first ``num_known`` tokens of a placed request are computed, and these drafted ones behind them, where
        these are all."""
        ...

    def abandon(self) -> None:
        """A step has failed: what it was to compute is not there."""
        ...

    def finish(self, context: Context) -> None:
        """The request has ended or is not drafted for any more. Also for requests that were never asked for."""
        ...


@dataclass
class _Held:
    """A request with pages: the keys and values of its first ``num_known`` tokens are there, and behind them those of
    drafted tokens, of which the request may have taken some since."""

    context: Context
    slot: int
    num_known: int
    ahead: list[int] = field(default_factory=list)

    def roll_back(self) -> None:
        """Finds how much of what was computed the request has taken; the rest will be overwritten. Tokens only grow,
        so what was once known stays right."""
        tokens = self.context.tokens
        for token in self.ahead:
            if self.num_known == len(tokens) or tokens[self.num_known] != token:
                break
            self.num_known += 1
        self.ahead.clear()

    @property
    def num_settled(self) -> int:
        """Computed tokens that no later row overwrites: the last token's row may run again, for its logits."""
        return min(self.num_known, len(self.context.tokens) - 1)


class OwnPages:
    """A pool and a prefix cache of the draft model's own, for any model with the target's vocabulary.

    A request gets a slot when it is first asked for and keeps it. When slots or pages run out, the request that was not
    asked for the longest gives its pages up to the cache. None of the same call does, unless there is no place for it:
    requests that do not all fit would be computed again and again in turn.

    Only tokens that a request really has enter the cache, when the step that computes them is planned, so that requests
    that begin alike share them at once; nothing crosses domains. A step that fails costs the whole cache: nothing that
    it may have touched is trusted.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_sequences: int,
        context_length: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        """Without ``prefix_cache`` requests share nothing, and nothing stays of one that ends or gives way."""
        self._executor = executor
        self._prefix_cache = prefix_cache
        self._max_sequences = max_sequences
        self._context_length = context_length or executor.model.context_length
        self._asked: set[int] = set()
        self._held: dict[int, _Held] = {}  # the one that was not asked for the longest first
        self.kv = self._empty()

    @property
    def table(self) -> NDArray[np.int32]:
        """See ``DraftPages``."""
        return self.kv.table

    @property
    def page_copies(self) -> Sequence[tuple[int, int]]:
        """See ``DraftPages``."""
        return self.kv.page_copies

    def begin(self, contexts: Sequence[Context]) -> None:
        """See ``DraftPages``."""
        self._asked = {context.request_id for context in contexts}

    def gap(self, context: Context) -> int:
        """See ``DraftPages``."""
        held = self._held.get(context.request_id)
        if held is None:
            return len(context.tokens)
        held.roll_back()
        return len(context.tokens) - held.num_settled

    def place(self, context: Context, num_tokens: int) -> Place | None:
        """See ``DraftPages``."""
        if pages_for(len(context.tokens)) > self.kv.pool.num_pages:
            self.finish(context)  # it only grows
            return None
        held = self._held.pop(context.request_id, None) or self._open(context)
        if held is None:
            return None
        self._held[context.request_id] = held  # now the last of the dictionary: the one asked for latest
        held.roll_back()
        num_settled = held.num_settled
        self.kv.publish(held.slot, context.tokens, num_settled, is_computed=True)
        self.kv.slide(held.slot, num_settled)
        if not self._grow(held.slot, len(context.tokens)):
            self._asked.remove(context.request_id)  # what it holds serves others better
            return None
        self._grow(held.slot, num_tokens)
        return Place(held.slot, num_settled, self.kv.capacity[held.slot])

    def compute(self, context: Context, num_computed: int) -> None:
        """See ``DraftPages``."""
        tokens = context.tokens
        self.kv.publish(self._held[context.request_id].slot, tokens, min(num_computed, len(tokens) - 1))

    def finish_step(self) -> None:
        """See ``DraftPages``."""
        self.kv.finish_step()

    def keep(self, context: Context, num_known: int, ahead: Sequence[int]) -> None:
        """See ``DraftPages``."""
        assert not ahead or num_known == len(context.tokens)
        held = self._held[context.request_id]
        held.num_known, held.ahead = num_known, list(ahead)

    def abandon(self) -> None:
        """See ``DraftPages``."""
        self._held = {}
        self.kv = self._empty()

    def finish(self, context: Context) -> None:
        """See ``DraftPages``."""
        held = self._held.pop(context.request_id, None)
        if held is not None:
            self._close(held)

    def _empty(self) -> KVManager:
        executor = self._executor
        return KVManager(
            executor.num_pages,
            self._max_sequences,
            self._context_length,
            prefix_cache=self._prefix_cache,
            window=executor.model.kv_window,
        )

    def _open(self, context: Context) -> _Held | None:
        key = token_key(context.tokens)
        while True:
            opened: Opened | None = None
            if len(self._held) < self._max_sequences:
                opened = self.kv.open(context.domain, key, limit=len(context.tokens) - 1)
            if opened is not None:
                return _Held(context, opened.slot, opened.num_cached)
            if not self._evict():
                return None

    def _grow(self, slot: int, num_tokens: int) -> bool:
        while not self.kv.grow(slot, num_tokens):
            if not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        """Takes the pages of the request that was not asked for the longest; False when nobody can be asked to."""
        victim = next((request_id for request_id in self._held if request_id not in self._asked), None)
        if victim is None:
            return False
        self._close(self._held.pop(victim))
        return True

    def _close(self, held: _Held) -> None:
        held.roll_back()
        self.kv.close(held.slot, held.context.tokens, held.num_known)


class TargetPages:
    """The target's own pages, for a draft model that is the target with cheaper weights: its keys and values are close
    enough to read, so that a prompt costs no pass of the draft model.

    The draft model reads what the target has computed, positions before the last known token's, and never writes there.
    It writes from that position on. These rows are wrong for the target and yet it never reads one: it has not computed
    the last known token, so its next pass starts at that same position; a pass writes the keys and values of all its
    rows before it reads any; and what a pass does not reach (nodes that were dropped or refused) lies beyond the tokens
    that it counts as computed, so that a later pass writes it, too, before it reads it. Nobody else reads them either:
    only pages that are computed as a whole, or the computed part of one, are shared.

    Pages for drafted tokens are taken from the target's pool only while one is left for each running request, as the
    scheduler does. Copies that the target's next step would make are made by the first step here, so that the draft
    model does not read pages before they are filled; being made again does no harm, as the target then computes its own
    rows. Of a request that shares pages which another's rows of that same step are still to fill, the draft is of no
    use; it is right from the next step on.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._copies: list[tuple[int, int]] = []

    @property
    def table(self) -> NDArray[np.int32]:
        """See ``DraftPages``."""
        return self._kv.table

    @property
    def page_copies(self) -> Sequence[tuple[int, int]]:
        """See ``DraftPages``."""
        return self._copies

    def begin(self, contexts: Sequence[Context]) -> None:
        """See ``DraftPages``."""
        self._copies = list(self._kv.page_copies)

    def gap(self, context: Context) -> int:
        """The last token: the target has computed the others."""
        return 1

    def place(self, context: Context, num_tokens: int) -> Place | None:
        """See ``DraftPages``."""
        kv, slot = self._kv, context.slot
        num_computed = len(context.tokens) - 1
        if slot is None or kv.capacity[slot] <= num_computed:
            return None
        missing = pages_for(num_tokens) - kv.capacity[slot] // PAGE_TOKENS
        spare = kv.num_available - sum(map(bool, kv.capacity))
        if min(missing, spare) > 0:
            kv.grow(slot, kv.capacity[slot] + min(missing, spare) * PAGE_TOKENS)
        written = kv.table[slot, num_computed // PAGE_TOKENS : kv.capacity[slot] // PAGE_TOKENS].tolist()
        assert all(kv.pool.references(page) == 1 for page in written), "a draft would write a shared page"
        return Place(slot, num_computed, kv.capacity[slot])

    def compute(self, context: Context, num_computed: int) -> None:
        """Nothing: what the draft model computes is nobody's but its own."""

    def finish_step(self) -> None:
        """See ``DraftPages``."""
        self._copies = []  # a second time they would undo what the first step wrote

    def keep(self, context: Context, num_known: int, ahead: Sequence[int]) -> None:
        """Nothing: the target overwrites it."""

    def abandon(self) -> None:
        """See ``DraftPages``."""
        self._copies = []

    def finish(self, context: Context) -> None:
        """Nothing: the pages are the target's."""
