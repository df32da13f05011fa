"""Drafts by a smaller model, or by the target with cheaper weights: it runs ahead a few tokens, one step each.

Source: Leviathan et al. 2022 (2211.17192) and Chen et al. 2023 (2302.01318); draws coupled by shared noise: Daliri,
Musco and Suresh 2024 (2408.07978).

Notation
    q  distribution [vocab] that a drafted token is drawn from

One rule schedules a request here as in the engine: it has tokens, known and drafted, of which some are computed; each
step closes the gap, and the row that closes it draws the next token. Prompts, what the target added since last time and
the drafts themselves are the same code, and all requests share each step.

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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.errors import UnsupportedError
from paceline.executors.base import Executor, StepPlan
from paceline.sampling.draw import philox4x32
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import MAX_LOGPROBS, SAMPLE_ROW, SampledRows, SampleRows
from paceline.speculate.draft import MAX_NODES, Context, Draft
from paceline.speculate.draft_pages import DraftPages

MIN_CONFIDENCE = 0.3
"""Where a draft stops unless told otherwise: a token that has this chance rarely pays for the step that drafts it."""

_LEAST = 1e-6
"""A confidence is above 0, whatever float32 makes of a probability."""


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


@dataclass
class _Line:
    """A request while it is drafted for.

    limit         tokens to draft at most;  max_nodes  nodes of its draft at most, branches included
    num_computed  of its tokens, known ones and then drafted ones
    tokens, confidence, q  of the drafted ones;  product  of their confidences
    branches  (token, confidence) besides the first of them;  is_open  whether another one is drawn
    """

    context: Context
    limit: int
    max_nodes: int
    slot: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[NDArray[np.float64]] = field(default_factory=list)
    branches: list[tuple[int, float]] = field(default_factory=list)
    product: float = 1.0
    is_open: bool = True

    @property
    def num_tokens(self) -> int:
        """Known and drafted ones."""
        return len(self.context.tokens) + len(self.tokens)

    @property
    def gap(self) -> int:
        """Rows until the next token can be drawn."""
        return self.num_tokens - self.num_computed

    @property
    def is_drawing(self) -> bool:
        """Whether the step under way draws a token."""
        return self.num_scheduled == self.gap

    def scheduled_tokens(self) -> list[int]:
        """The tokens of the step's rows."""
        num_known = len(self.context.tokens)
        start, end = self.num_computed, self.num_computed + self.num_scheduled
        if start >= num_known:
            return self.tokens[start - num_known : end - num_known]
        return self.context.tokens[start:end] + self.tokens[: max(0, end - num_known)]

    def draft(self, drafter: str) -> Draft | None:
        """What it proposes: the chain, and of the branches what has room among the likeliest nodes."""
        if not self.tokens:
            return None
        if not self.branches:
            return Draft.chain(self.tokens, self.confidence, drafter, self.q or None)
        length = len(self.tokens)
        products = [*np.cumprod(self.confidence).tolist(), *(confidence for _, confidence in self.branches)]
        # Products only fall along the chain and the sort keeps the order of equals: what stays of it is its beginning.
        likeliest = sorted(range(len(products)), key=lambda node: -products[node])[: self.max_nodes]
        kept = sum(node < length for node in likeliest)
        branches = [self.branches[node - length] for node in sorted(likeliest) if node >= length]
        return Draft(
            (*self.tokens[:kept], *(token for token, _ in branches)),
            (*range(kept), *(0 for _ in branches)),
            (*self.confidence[:kept], *(confidence for _, confidence in branches)),
            drafter,
        )


class _DraftLists(ListsBuilder):
    """Lists for a model whose vocabulary is not the target's: without the ids that it lacks, and with those banned that
    the target lacks."""

    def __init__(self, rows: NDArray[np.void], vocab_size: int, surplus: NDArray[np.int32]) -> None:
        super().__init__(rows)
        self._vocab_size = vocab_size
        self._surplus = surplus
        self._without_ban = set(range(len(rows)))

    def add_counts(self, output: int, tokens: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        """See ``ListsBuilder``."""
        has = tokens < self._vocab_size
        super().add_counts(output, tokens[has], values[has])

    def add_bias(self, output: int, tokens: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """See ``ListsBuilder``."""
        has = tokens < self._vocab_size
        super().add_bias(output, tokens[has], values[has])

    def add_banned(self, output: int, tokens: NDArray[np.int32]) -> None:
        """See ``ListsBuilder``."""
        self._without_ban.discard(output)
        super().add_banned(output, np.concatenate([tokens[tokens < self._vocab_size], self._surplus]))

    def build(self) -> SampleRows:
        """See ``ListsBuilder``."""
        for output in sorted(self._without_ban):
            super().add_banned(output, self._surplus)
        return super().build()


class DraftModelDrafter:
    """Drafts with an executor over ``pages``; see the module.

    Requests are in slots of ``pages`` from when they are first asked for until ``finish``. No draft for a request that
    is longer than the draft model's context, that holds a token which it does not have, or for which there is no room.
    When a step fails, the error is raised and all drafts of the call are lost; the drafter can go on.
    """

    name = "draft"
    is_free = False
    catch_up_s = 0.0

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
    ) -> None:
        """``vocab_size`` is the target's; ``context_length`` what the executor was built for, its model's by default.

        ``max_branches`` is how many tokens may be proposed to follow the last known one: 1 makes drafts chains.
        """
        assert 1 <= max_branches <= MAX_LOGPROBS
        assert max_branches == 1 or not exact, "a branch that was not drawn has no q"
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

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """See ``Drafter``. Raises what the executor raises."""
        lines = [self._line(context, limit) for context, limit in zip(contexts, limits, strict=True)]
        waiting = deque(line for line in lines if line is not None)
        self._pages.begin([line.context for line in waiting])
        placed: list[_Line] = []
        try:
            while waiting or any(line.is_open for line in placed):
                scheduled = self._schedule(placed, waiting)
                if scheduled:
                    self._step(scheduled)
        except Exception:
            self._pages.abandon()
            raise
        for line in placed:
            num_known = len(line.context.tokens)
            self._pages.keep(line.context, line.tokens[: line.num_computed - num_known])
        return [None if line is None else line.draft(self.name) for line in lines]

    def finish(self, context: Context) -> None:
        """See ``Drafter``."""
        self._pages.finish(context)

    def _line(self, context: Context, limit: int) -> _Line | None:
        """A request with the number of tokens to draft for it; None where there can be none."""
        tokens = context.tokens
        is_foreign = self._draft_vocab_size < self._vocab_size and max(tokens) >= self._draft_vocab_size
        if is_foreign or len(tokens) > self._context_length:
            self._pages.finish(context)  # it only grows: there is no draft for it any more
            return None
        # The last drafted token is never computed here, and the target draws one more than it accepts.
        depth = min(context.max_tokens - len(tokens) - 1, self._context_length - len(tokens) + 1)
        max_nodes = min(limit, MAX_NODES)
        return _Line(context, min(max_nodes, depth), max_nodes) if min(max_nodes, depth) > 0 else None

    def _schedule(self, placed: list[_Line], waiting: deque[_Line]) -> list[_Line]:
        """The lines of the next step, those that lack least first; ``placed`` gets those of ``waiting`` that begin."""
        rows, outputs = self._executor.max_rows, self._executor.max_outputs
        scheduled = []
        queue = iter(sorted((line for line in placed if line.is_open), key=lambda line: line.gap))
        while rows > 0:
            line = next(queue, None) or self._admit(placed, waiting)
            if line is None:
                break
            line.num_scheduled = min(line.gap if outputs else line.gap - 1, rows)
            if line.num_scheduled > 0:
                self._pages.compute(line.context, line.num_computed + line.num_scheduled)
                scheduled.append(line)
                rows -= line.num_scheduled
                outputs -= line.is_drawing
        return scheduled

    def _admit(self, placed: list[_Line], waiting: deque[_Line]) -> _Line | None:
        """The next waiting line for which there is room; it may draft what its pages hold."""
        while waiting:
            line = waiting.popleft()
            num_known = len(line.context.tokens)
            place = self._pages.place(line.context, num_known + line.limit - 1)
            if place is not None:
                line.slot, line.num_computed = place.slot, place.num_computed
                line.limit = min(line.limit, place.num_room - num_known + 1)
                placed.append(line)
                return line
        return None

    def _step(self, lines: Sequence[_Line]) -> None:
        """Computes the scheduled rows of ``lines`` and draws a token for each whose gap they close."""
        drawing = [line for line in lines if line.is_drawing]
        samples = self._samples(drawing)
        sampled = self._executor.run(self._plan(lines, samples)).sampled
        self._pages.finish_step()
        for line in lines:
            line.num_computed += line.num_scheduled
        has_token = [sampled.status is None or sampled.status[output] == 0 for output in range(len(drawing))]
        q: dict[int, NDArray[np.float64]] = {}
        if self._exact:
            drawn = [at for at in range(len(drawing)) if has_token[at] and samples.rows["temperature"][at] > 0]
            if drawn:
                q = dict(zip(drawn, self._fitting(self._executor.probabilities(samples, drawn)), strict=True))
        for output, line in enumerate(drawing):
            if has_token[output]:
                self._add(line, sampled, output, q.get(output))
            else:
                line.is_open = False

    def _plan(self, lines: Sequence[_Line], samples: SampleRows) -> StepPlan:
        tokens: list[int] = []
        positions: list[int] = []
        row_starts = [0]
        logit_rows = []
        for line in lines:
            tokens += line.scheduled_tokens()
            positions += range(line.num_computed, line.num_computed + line.num_scheduled)
            row_starts.append(len(tokens))
            if line.is_drawing:
                logit_rows.append(len(tokens) - 1)
        num_pages = max(positions) // PAGE_TOKENS + 1
        return StepPlan(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(row_starts, np.int32),
            self._pages.table[[line.slot for line in lines], :num_pages],
            np.array(logit_rows, np.int32),
            samples,
            np.array(self._pages.page_copies, np.int32).reshape(-1, 2),
        )

    def _samples(self, lines: Sequence[_Line]) -> SampleRows:
        """How the token of each line is drawn."""
        rows: Any = np.zeros(len(lines), SAMPLE_ROW)
        for output, line in enumerate(lines):
            rows[output] = line.context.record[0]
            rows[output]["position"] = line.num_tokens
            rows[output]["num_logprobs"] = self._max_branches if self._max_branches > 1 and not line.tokens else 0
            if self._exact and rows[output]["temperature"] > 0:
                rows[output]["seed"] = draft_seed(int(rows[output]["seed"]), len(line.context.tokens))
        lists = ListsBuilder(rows)
        if self._draft_vocab_size != self._vocab_size:
            lists = _DraftLists(rows, self._draft_vocab_size, self._surplus)
        for output, line in enumerate(lines):
            line.context.add_lists(lists, output, line.tokens)
        return lists.build()

    def _add(self, line: _Line, sampled: SampledRows, output: int, q: NDArray[np.float64] | None) -> None:
        """Adds the token that was drawn at an output."""
        token = int(sampled.tokens[output])
        if self._max_branches > 1 and not line.tokens:
            others = zip(sampled.top_tokens[output].tolist(), sampled.top_logprobs[output].tolist(), strict=True)
            fitting = [(at, _confidence(logprob)) for at, logprob in others if 0 <= at < self._vocab_size]
            line.branches = [branch for branch in fitting if branch[0] != token][: self._max_branches - 1]
        line.tokens.append(token)
        if q is None:
            line.confidence.append(_confidence(float(sampled.logprobs[output])))
        else:
            line.q.append(q)
            line.confidence.append(min(1.0, max(_LEAST, float(q.max()))))
        line.product *= line.confidence[-1]
        line.is_open = len(line.tokens) < line.limit and line.product >= self._min_confidence

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


def _confidence(logprob: float) -> float:
    """A probability as ``Draft`` wants it."""
    return min(1.0, max(_LEAST, float(np.exp(logprob))))
