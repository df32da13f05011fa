"""Drafts by a smaller model, or by the target with cheaper weights: it runs ahead a few tokens, one step each.

Source: Leviathan et al. 2022 (2211.17192) and Chen et al. 2023 (2302.01318); draws coupled by shared noise: Daliri,
Musco and Suresh 2024 (2408.07978).

Notation
    q  distribution [vocab] that a drafted token is drawn from

One rule schedules a request here as in the engine: it has tokens, known and drafted, of which some are computed; each
step closes the gap, and the row that closes it draws the next token. Prompts, what the target added since last time and
the drafts themselves are the same code, and all requests share each step.

A request whose tokens are not computed is behind: its prompt, or what it got while nobody asked. Catching up is no
part of a draft's price (``catch_up_s``), and others must not wait for it: a call computes at most ``catch_up_rows`` of
such rows, those of the request that has been behind the longest first, and who is still behind then gets no draft and
goes on at the next call. A request that lacks at most ``READY_ROWS`` is not held up: each call closes its gap.

How tokens are drawn. By default with the request's own record: the same penalties, biases and bans, the same noise at
the same position. So draft and target choose the same token wherever their distributions allow it. ``exact`` is for
stochastic acceptance, which wants tokens drawn from a q that it is told, by randomness that nothing else uses, not even
a later draft of the same position: the noise then has a key of its own, made from the request's seed and the number of
known tokens, which is different in each step.

How sure it is. The confidence of a token is the probability that the draft model itself gives it, at temperature 1 and
without penalties: it ranks tokens, and the controller learns what it is worth. With ``exact`` it is the largest
probability of q instead, which does not depend on the token drawn: whoever drops a node for its own token changes the
law of the answer. A draft stops behind the token that brings the product of confidences under ``min_confidence``; that
token has been paid for, and is proposed.

Departures: no beam. ``max_branches`` adds the next most likely tokens at the first node, as leaves.

Checked by: tests/unit/test_draft_model.py (against the draft model alone, with planted errors),
tests/native/test_draft_model.py.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.errors import UnsupportedError
from paceline.executors.base import Executor
from paceline.sampling.draw import philox4x32
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import MAX_LOGPROBS, SAMPLE_ROW, SampledRows, SampleRows
from paceline.speculate.draft import MAX_NODES, Context, Draft
from paceline.speculate.draft_line import MIN_CONFIDENCE, Line, confidence_of, likeliest, step_plan
from paceline.speculate.draft_lists import DraftLists
from paceline.speculate.draft_pages import DraftPages

CATCH_UP_ROWS = 256
"""Rows for requests that are behind which one call computes unless told otherwise: a step's worth of a prompt."""

READY_ROWS = 16
"""Who lacks no more than these is ready: a call computes them whoever else is behind."""

_DRAFT_ROWS = 2
"""Of a request's last tokens, that any draft may have to compute: the last one has never been, nor has the one before
when the target took a whole draft, whose end was not computed."""

_NO_PAIRS = np.zeros((0, 2), np.int32)


class Vocabulary(Protocol):
    """What ``check_vocabularies`` reads of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> None:
    """Raises ``UnsupportedError`` when an id stands for other bytes in the draft model than in the target.

    Ids without bytes (padding, control tokens, which models of a family name differently) are not compared, nor those
    that only one of the two has: a draft may be refused there, and no more.
    """
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_bytes(token_id), draft.token_bytes(token_id)
        if ours != theirs and ours and theirs:
            raise UnsupportedError(
                f"the draft model has another vocabulary: token {token_id} is {theirs!r} there and {ours!r} in the "
                "target; take a smaller model of the target's own family"
            )


class DraftModelDrafter:
    """Drafts with an executor over ``pages``; see the module.

    Requests are in slots of ``pages`` from when they are first asked for until ``finish``. No draft for a request that
    is longer than the draft model's context, that holds a token which it does not have, or for which there is no room.
    When a step fails, the error is raised and all drafts of the call are lost; the drafter can go on.
    """

    name = "draft"
    is_free = False

    def __init__(
        self,
        executor: Executor,
        pages: DraftPages,
        *,
        vocab_size: int,
        context_length: int | None = None,
        min_confidence: float = MIN_CONFIDENCE,
        max_branches: int = 1,
        exact: bool = False,
        catch_up_rows: int = CATCH_UP_ROWS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``vocab_size`` is the target's; ``context_length`` what the executor was built for, its model's by default.

        ``max_branches`` is how many tokens may be proposed to follow the last known one: 1 makes drafts chains.
        ``catch_up_rows`` of requests that are behind are computed in a call at most. ``clock`` tells seconds.
        """
        assert 1 <= max_branches <= MAX_LOGPROBS
        assert max_branches == 1 or not exact, "a branch that was not drawn has no q"
        assert catch_up_rows >= 1
        self.catch_up_s = 0.0
        self._executor = executor
        self._pages = pages
        self._vocab_size = vocab_size
        self._draft_vocab_size = executor.model.vocab_size
        self._surplus = np.arange(vocab_size, self._draft_vocab_size, dtype=np.int32)
        self._context_length = min(
            executor.model.context_length,
            pages.table.shape[1] * PAGE_TOKENS,
            context_length or executor.model.context_length,
        )
        self._min_confidence = min_confidence
        self._max_branches = max_branches
        self._exact = exact
        self._catch_up_rows = catch_up_rows
        self._clock = clock
        self._num_checked: dict[int, float] = {}  # leading tokens that the draft model has; infinity: one it has not
        self._behind: dict[int, int] = {}  # since when, in the order in which requests fell behind
        self._num_behind = 0  # that ever were
        self._budget = 0  # rows for those behind, left in this call

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """See ``Drafter``. Raises what the executor raises."""
        self.catch_up_s = 0.0
        self._budget = self._catch_up_rows
        lines = [self._line(context, limit) for context, limit in zip(contexts, limits, strict=True)]
        waiting = deque(sorted((line for line in lines if line is not None), key=self._since))
        self._pages.begin([line.context for line in waiting])
        placed: list[Line] = []
        begun_s = self._clock()
        try:
            while scheduled := self._schedule(placed, waiting):
                num_behind, num_rows = sum(map(_rows_behind, scheduled)), sum(line.num_scheduled for line in scheduled)
                self._step(scheduled)
                ended_s = self._clock()
                self.catch_up_s += (ended_s - begun_s) * num_behind / num_rows
                begun_s = ended_s
        except Exception:
            self._pages.abandon()
            raise
        for line in placed:
            num_known = line.num_known
            ahead = line.tokens[: max(0, line.num_computed - num_known)]
            self._pages.keep(line.context, min(num_known, line.num_computed), ahead)
            if line.num_computed >= num_known:
                self._behind.pop(line.context.request_id, None)
        return [None if line is None else line.draft(self.name) for line in lines]

    def finish(self, context: Context) -> None:
        """See ``Drafter``."""
        self._num_checked.pop(context.request_id, None)
        self._behind.pop(context.request_id, None)
        self._pages.finish(context)

    def _line(self, context: Context, limit: int) -> Line | None:
        """A request with the number of tokens to draft for it; None where there can be none."""
        num_known = len(context.tokens)
        if num_known > self._context_length or self._is_foreign(context):
            self._behind.pop(context.request_id, None)
            self._pages.finish(context)  # it only grows: there is no draft for it any more
            return None
        # The last drafted token is never computed here, and the target draws one more than it accepts.
        depth = min(context.max_tokens - num_known - 1, self._context_length - num_known + 1)
        max_nodes = min(limit, MAX_NODES)
        if min(max_nodes, depth) < 1:
            return None
        num_computed = num_known - self._pages.gap(context)
        return Line(
            context=context,
            num_known=num_known,
            limit=min(max_nodes, depth),
            max_nodes=max_nodes,
            num_computed=num_computed,
        )

    def _is_foreign(self, context: Context) -> bool:
        """Whether a token is none of the draft model's; each is looked at once."""
        if self._draft_vocab_size >= self._vocab_size:
            return False
        tokens, checked = context.tokens, self._num_checked.get(context.request_id, 0)
        if checked < len(tokens):
            is_foreign = max(tokens[int(checked) :]) >= self._draft_vocab_size
            checked = self._num_checked[context.request_id] = math.inf if is_foreign else len(tokens)
        return checked == math.inf

    def _since(self, line: Line) -> int:
        """Since when a line is behind; 0 when it is ready."""
        if line.gap <= READY_ROWS:
            return 0
        since = self._behind.get(line.context.request_id)
        if since is None:
            self._num_behind += 1
            since = self._behind[line.context.request_id] = self._num_behind
        return since

    def _schedule(self, placed: list[Line], waiting: deque[Line]) -> list[Line]:
        """The lines of the next step, the ready ones that lack least first, then those that are behind, the longest
        first; ``placed`` gets those of ``waiting`` that begin."""
        rows, outputs = self._executor.max_rows, self._executor.max_outputs
        scheduled = []
        queue = iter(sorted((line for line in placed if line.is_open), key=lambda line: min(line.gap, READY_ROWS + 1)))
        while rows > 0:
            line = next(queue, None) or (self._admit(placed, waiting) if waiting else None)
            if line is None:
                break
            gap = line.gap
            most = min(rows, self._budget) if gap > READY_ROWS else rows
            num_scheduled = line.num_scheduled = min(gap if outputs else gap - 1, most)
            if num_scheduled > 0:
                if line.num_computed < line.num_known:
                    self._pages.compute(line.context, line.num_computed + num_scheduled)
                scheduled.append(line)
                rows -= num_scheduled
                outputs -= num_scheduled == gap
                if gap > READY_ROWS:
                    self._budget -= num_scheduled
        return scheduled

    def _admit(self, placed: list[Line], waiting: deque[Line]) -> Line | None:
        """The next waiting line for which there is room; it may draft what its pages hold. One that is behind waits
        when nothing can be computed for it: what others compute meanwhile it may find in the cache."""
        while waiting and (self._budget > 0 or waiting[0].gap <= READY_ROWS):
            line = waiting.popleft()
            place = self._pages.place(line.context, line.num_known + line.limit - 1)
            if place is not None:
                line.slot, line.num_computed = place.slot, place.num_computed
                line.limit = min(line.limit, place.num_room - line.num_known + 1)
                placed.append(line)
                return line
        return None

    def _step(self, lines: list[Line]) -> None:
        """Computes the scheduled rows of ``lines`` and draws a token for each whose gap they close."""
        drawing = [line for line in lines if line.is_drawing]
        samples = self._samples(drawing)
        sampled = self._executor.run(
            step_plan(lines, self._pages.table, samples, page_copies=self._pages.page_copies)
        ).sampled
        self._pages.finish_step()
        for line in lines:
            line.num_computed += line.num_scheduled
        if not drawing:
            return
        status = [0] * len(drawing) if sampled.status is None else sampled.status.tolist()
        q: dict[int, NDArray[np.float64]] = {}
        if self._exact:
            drawn = [at for at, code in enumerate(status) if code == 0 and samples.rows["temperature"][at] > 0]
            if drawn:
                q = dict(zip(drawn, self._fitting(self._executor.probabilities(samples, drawn)), strict=True))
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        for output, line in enumerate(drawing):
            if status[output]:
                line.is_open = False
                continue
            drawn_from = q.get(output)
            if drawn_from is not None:
                line.q.append(drawn_from)
            confidence = confidence_of(math.exp(logprobs[output]) if drawn_from is None else float(drawn_from.max()))
            others = self._others(tokens[output], sampled, output) if not line.tokens else []
            line.add(tokens[output], confidence, self._min_confidence, others)

    def _samples(self, lines: Sequence[Line]) -> SampleRows:
        """How the token of each line is drawn."""
        rows: Any = np.zeros(len(lines), SAMPLE_ROW)
        for output, line in enumerate(lines):
            rows[output] = line.context.record[0]
            rows[output]["position"] = line.num_rows
            rows[output]["num_logprobs"] = self._max_branches if self._max_branches > 1 and not line.tokens else 0
            if self._exact and rows[output]["temperature"] > 0:
                rows[output]["seed"] = draft_seed(int(rows[output]["seed"]), line.num_known)
        lists = ListsBuilder(rows)
        if self._draft_vocab_size != self._vocab_size:
            lists = DraftLists(rows, self._draft_vocab_size, self._surplus)
        for output, line in enumerate(lines):
            line.context.add_lists(lists, output, line.tokens)
        return lists.build()

    def _others(self, token: int, sampled: SampledRows, output: int) -> list[tuple[int, float]]:
        """The likeliest tokens beside the one that was drawn at an output, and their confidences."""
        if self._max_branches == 1:
            return []
        tokens, logprobs = sampled.top_tokens[output].tolist(), sampled.top_logprobs[output].tolist()
        others = likeliest(tokens, logprobs, token, len(tokens))
        return [other for other in others if 0 <= other[0] < self._vocab_size][: self._max_branches - 1]

    def _fitting(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distributions over the target's vocabulary: ids that it lacks are banned here, and others have no mass."""
        missing = self._vocab_size - q.shape[1]
        return np.pad(q, ((0, 0), (0, missing))) if missing > 0 else q[:, : self._vocab_size]


def draft_seed(seed: int, num_tokens: int) -> int:
    """The key of the noise that drafts for ``num_tokens`` known tokens are drawn with, for exact acceptance.

    It is what Philox under ``seed`` makes of the counter (0, num_tokens, 2, 0): the third word is 0 for the noise of
    tokens and 1 for acceptance.
    """
    counter = np.array([[0, num_tokens, 2, 0]], np.uint32)
    low, high = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[0, :2].tolist()
    return int(low | high << 32)


def _rows_behind(line: Line) -> int:
    """Rows of the step under way that no draft of a request which had been asked for all the time would need."""
    return max(0, min(line.num_scheduled, line.num_known - _DRAFT_ROWS - line.num_computed))
