"""Drafts by a one-layer head on the target's hidden states, which knows the most frequent tokens only.

Source: Li et al. 2024 (EAGLE, 2401.15077), section 3; Li et al. 2024 (EAGLE-2, 2406.16858), section 4, for confidence
as the measure of a node and its cumulated product as the order of nodes; Zhao et al. 2025 (FR-Spec, 2502.14856) and
Goel et al. 2025 (VocabTrim, 2506.22694) for the trimmed vocabulary; Gumbel noise as in sampling/draw.py.

Notation
    t_i  token i of a request;  f_i  the target's hidden state (``Executor.hidden``) at its row
    h_r  the head's own hidden state at its row r
    p    the head's distribution over its vocabulary

Row r of the head reads token t_(b+r+1) and feature f_(b+r), and guesses token t_(b+r+2) by its logits and f_(b+r+1) by
h_r; b is the first token whose f is known. Rows of known tokens come first. A drafted token then has a row with h of
the row before in place of f. What the head computed from its own guesses is never kept: once the target has run over
these tokens, their rows are computed again with true features, and lie over the old ones.

How tokens are drawn. Where the target takes the likeliest token, the head's likeliest one; with ``exact`` at any
temperature, since a proposal that is certain needs no q. Else as the target draws: the head's logits are put where the
target has these tokens, the others get one that is never chosen, and the request's own record, with its penalties, bans
and top-p, draws from them with the target's noise at that position. That takes 0.15 ms for 49,152 tokens and 0.3 ms for
128,256, a third of the head's step for SmolLM2-135M; numpy needs 0.2 ms for the noise of 32 candidates alone.

Departures
    Positions are the head's own and begin with 0 at b, not with the token's: its pages must be filled from their
    start, and a prompt that was found in the prefix cache has no f. Rotary scores depend on differences only.
    Of each node's children only the drawn one is expanded; ``max_branches`` - 1 others, the next best, are leaves of
    the tree. They cost the head nothing, for it has computed their probabilities; EAGLE-2 expands k nodes a level.

Checked by: tests/native/test_eagle_drafter.py (against the head computed anew from all tokens and features).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.executors.base import Executor, StepPlan
from paceline.kv.manager import KVManager
from paceline.kv.radix import TOKEN_BYTES
from paceline.sampling.draw import sample_reference
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import MAX_LOGPROBS, SampledRows, SampleRows, greedy_rows
from paceline.speculate.draft import MAX_NODES, Context, Draft
from paceline.speculate.hidden import HiddenRows

MIN_CONFIDENCE = 0.3
"""Where a draft stops unless told otherwise: a token that has this chance rarely pays for the step that drafts it."""

MAX_WAITING = 2048
"""Hidden states of a request that are kept, at most, until it is drafted for."""

_LEAST = 1e-6
_NEVER = -1e6
"""The logit of a token that the head does not know. Finite: the sampler takes infinity for a fault."""

Features = NDArray[np.float32]
Sample = Callable[[NDArray[np.float32], SampleRows], SampledRows]


@dataclass
class _Held:
    """What is kept of a request.

    first         b: the token of its first feature
    num_computed  of its rows: their keys and values are in the pages of ``slot`` (None: it has no pages yet)
    waiting       features [n, hidden] of the rows behind these, ``num_waiting`` in all
    last          [1, hidden] that of the last computed row
    """

    first: int
    slot: int | None = None
    num_computed: int = 0
    num_waiting: int = 0
    waiting: deque[Features] = field(default_factory=deque)
    last: Features | None = None

    @property
    def end(self) -> int:
        """The token behind its last feature."""
        return self.first + self.num_computed + self.num_waiting

    def restart(self, first: int) -> None:
        """Forgets all rows; features begin with token ``first``."""
        self.first, self.num_computed, self.last = first, 0, None

    def add(self, features: Features, max_waiting: int) -> None:
        """Appends a copy of features, and gives up the oldest ones where too many wait."""
        num_lost = max(0, len(features) - max_waiting)
        features = features[num_lost:]
        while self.waiting and self.num_waiting + len(features) > max_waiting:
            num_lost += len(self.waiting[0])
            self.num_waiting -= len(self.waiting.popleft())
        if num_lost:
            self.restart(self.first + self.num_computed + num_lost)
        self.waiting.append(features.copy())
        self.num_waiting += len(features)

    def take(self) -> Features:
        """All that waits, and at least one row: the last computed one will be computed again then."""
        if not self.waiting:
            assert self.last is not None
            self.num_computed -= 1
            return self.last
        features = np.concatenate(self.waiting)
        self.waiting.clear()
        self.num_waiting = 0
        return features


@dataclass
class _Line:
    """A request while it is drafted for.

    features      [n, hidden] of its rows ``start`` .. ``start + n - 1``, the last of known tokens
    num_computed  of its rows, those of known tokens and then of drafted ones
    tokens, confidence  of the chain;  leaves  (row of the parent, token, confidence) besides it
    hidden        [hidden] the head's own at its last row;  product  of the chain's confidences
    """

    context: Context
    held: _Held
    features: Features
    start: int
    limit: int
    max_nodes: int
    num_computed: int = 0
    num_scheduled: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    leaves: list[tuple[int, int, float]] = field(default_factory=list)
    hidden: Features | None = None
    product: float = 1.0
    is_open: bool = True

    @property
    def slot(self) -> int:
        """Of its page table."""
        assert self.held.slot is not None
        return self.held.slot

    @property
    def num_known(self) -> int:
        """Rows of known tokens."""
        return self.start + len(self.features)

    @property
    def gap(self) -> int:
        """Rows until the next token can be drawn."""
        return self.num_known + len(self.tokens) - self.num_computed

    @property
    def is_drawing(self) -> bool:
        """Whether the step under way draws a token."""
        return self.num_scheduled == self.gap

    def scheduled(self) -> tuple[list[int], Features]:
        """Tokens and features of the step's rows, which are all of known tokens, or the one of the last drafted."""
        if self.tokens:
            assert self.num_scheduled == 1
            assert self.hidden is not None
            return [self.tokens[-1]], self.hidden[None]
        at, count = self.num_computed - self.start, self.num_scheduled
        token = self.held.first + self.num_computed + 1
        return self.context.tokens[token : token + count], self.features[at : at + count]

    def draft(self, drafter: str) -> Draft | None:
        """The chain, and of the leaves what is among the likeliest nodes."""
        if not self.tokens:
            return None
        products = [1.0, *np.cumprod(self.confidence).tolist()]
        nodes = [(row, token, confidence) for row, (token, confidence) in enumerate(self._chain())] + self.leaves
        # A node is not likelier than its parent, and the sort keeps the order of equals: parents stay, too.
        order = sorted(range(len(nodes)), key=lambda node: -products[nodes[node][0]] * nodes[node][2])
        kept = [nodes[node] for node in sorted(order[: self.max_nodes])]
        parents, tokens, confidence = zip(*kept, strict=True)
        return Draft(tokens, parents, confidence, drafter)

    def _chain(self) -> list[tuple[int, float]]:
        return list(zip(self.tokens, self.confidence, strict=True))


class EagleDrafter:
    """Drafts with ``executor``, which runs a graph of models/eagle.py; see the module. A ``HiddenObserver``.

    A request that is drafted for has pages of the executor's pool until ``finish``, or until they are taken for
    others: then its rows begin again with the next feature that comes. No draft where the last features are missing.
    When a step fails the error is raised, and what was kept of the requests of the call is lost.
    """

    name = "eagle"
    is_free = False
    catch_up_s = 0.0

    def __init__(
        self,
        executor: Executor,
        target_ids: NDArray[np.int32],
        *,
        max_sequences: int,
        context_length: int | None = None,
        min_confidence: float = MIN_CONFIDENCE,
        max_branches: int = 1,
        max_waiting: int = MAX_WAITING,
        exact: bool = False,
        sample: Sample = sample_reference,
    ) -> None:
        """``target_ids`` [draft_vocab] are the target's ids of the head's tokens. ``max_branches`` is how many children
        of a node may be proposed: 1 makes drafts chains. ``exact`` is for stochastic acceptance. ``sample`` chooses
        from logits [outputs, vocab] of the target's vocabulary."""
        vocab_size = executor.model.vocab_size
        assert len(target_ids) == executor.model.num_logits
        assert 1 <= max_branches <= MAX_LOGPROBS
        assert max_waiting >= 1
        self._executor = executor
        self._target_ids = target_ids
        self._min_confidence = min_confidence
        self._max_branches = max_branches
        self._max_waiting = max_waiting
        self._exact = exact
        self._sample = sample
        self._logits = np.full((1, vocab_size), _NEVER, np.float32)
        self._max_sequences = max_sequences
        context_length = min(context_length or executor.model.context_length, executor.model.context_length)
        window = executor.model.kv_window
        self.kv = KVManager(executor.num_pages, max_sequences, context_length, prefix_cache=False, window=window)
        self._context_length = context_length
        self._held: dict[int, _Held] = {}  # the one that was not asked for the longest first

    def observe_hidden(self, step: Sequence[HiddenRows]) -> None:
        """See ``HiddenObserver``."""
        for rows in step:
            held = self._held.get(rows.context.request_id)
            if held is None:
                held = self._held[rows.context.request_id] = _Held(rows.position)
            if rows.position > held.end:  # something between is missing
                held.waiting.clear()
                held.num_waiting = 0
                held.restart(rows.position)
            new = rows.hidden[held.end - rows.position :]
            if len(new):
                held.add(new, self._max_waiting)

    def propose(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft | None]:
        """See ``Drafter``. Raises what the executor raises."""
        asked = {context.request_id for context in contexts}
        lines = [self._line(context, limit, asked) for context, limit in zip(contexts, limits, strict=True)]
        placed = [line for line in lines if line is not None]
        try:
            while any(line.is_open for line in placed):
                self._step(self._schedule(placed))
        except Exception:
            for line in placed:
                self.finish(line.context)
            raise
        for line in placed:
            line.held.num_computed, line.held.last = line.num_known, line.features[-1:].copy()
        return [None if line is None else line.draft(self.name) for line in lines]

    def finish(self, context: Context) -> None:
        """See ``Drafter``."""
        held = self._held.pop(context.request_id, None)
        if held is not None and held.slot is not None:
            self.kv.close(held.slot)

    def _line(self, context: Context, limit: int, asked: set[int]) -> _Line | None:
        """A request with pages, and the number of tokens to draft for it; None where there can be none."""
        held = self._held.get(context.request_id)
        num_known = len(context.tokens)
        if held is None or held.end != num_known - 1:
            return None
        num_rows = num_known - 1 - held.first
        # The last drafted token is never computed here, and the target draws one more than it accepts.
        depth = min(context.max_tokens - num_known - 1, self._context_length - num_rows + 1)
        max_nodes = min(limit, MAX_NODES)
        limit = min(max_nodes, depth)
        if limit < 1 or num_rows < 1:
            return None
        self._held[context.request_id] = self._held.pop(context.request_id)  # the one asked for latest
        if not self._place(held, num_rows + limit - 1, asked):
            self.finish(context)
            return None
        features = held.take()
        return _Line(context, held, features, held.num_computed, limit, max_nodes, held.num_computed)

    def _place(self, held: _Held, num_rows: int, asked: set[int]) -> bool:
        """Gives a request pages for so many rows, if need be those of requests that are not asked for."""
        while True:
            if held.slot is not None:
                is_placed = self.kv.grow(held.slot, num_rows)
            elif sum(other.slot is not None for other in self._held.values()) < self._max_sequences:
                opened = self.kv.open(b"", bytes(TOKEN_BYTES * num_rows), limit=0)
                held.slot = None if opened is None else opened.slot
                is_placed = opened is not None
            else:
                is_placed = False
            if is_placed:
                return True
            others = (key for key, other in self._held.items() if key not in asked and other.slot is not None)
            victim = next(others, None)
            if victim is None:
                return False
            slot = self._held.pop(victim).slot
            assert slot is not None
            self.kv.close(slot)

    def _schedule(self, lines: Sequence[_Line]) -> list[_Line]:
        """The lines of the next step, those that lack least first."""
        rows, outputs = self._executor.max_rows, self._executor.max_outputs
        scheduled = []
        for line in sorted((line for line in lines if line.is_open), key=lambda line: line.gap):
            line.num_scheduled = min(line.gap if outputs else line.gap - 1, rows)
            if line.num_scheduled > 0:
                scheduled.append(line)
                rows -= line.num_scheduled
                outputs -= line.is_drawing
        return scheduled

    def _step(self, lines: Sequence[_Line]) -> None:
        """Computes the scheduled rows of ``lines`` and draws a token for each whose gap they close."""
        plan = self._plan(lines)
        sampled = self._executor.run(plan).sampled
        hidden, logits = self._executor.hidden(), self._executor.logits()
        drawing = [line for line in lines if line.is_drawing]
        for output, (line, row) in enumerate(zip(drawing, plan.logit_rows.tolist(), strict=True)):
            line.hidden = hidden[row].copy()
            if sampled.status is not None and sampled.status[output]:
                line.is_open = False
        for line in lines:
            line.num_computed += line.num_scheduled
        for output, line in enumerate(drawing):
            if line.is_open:
                self._add(line, sampled, output, logits[output])

    def _plan(self, lines: Sequence[_Line]) -> StepPlan:
        tokens: list[int] = []
        features = []
        positions: list[int] = []
        row_starts = [0]
        logit_rows = []
        for line in lines:
            its_tokens, its_features = line.scheduled()
            tokens += its_tokens
            features.append(its_features)
            positions += range(line.num_computed, line.num_computed + line.num_scheduled)
            row_starts.append(len(tokens))
            if line.is_drawing:
                logit_rows.append(len(tokens) - 1)
        samples = greedy_rows(len(logit_rows))
        samples.rows["position"] = [positions[row] + 1 for row in logit_rows]
        samples.rows["num_logprobs"] = self._num_alternatives
        return StepPlan(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(row_starts, np.int32),
            self.kv.table[[line.slot for line in lines], : max(positions) // PAGE_TOKENS + 1],
            np.array(logit_rows, np.int32),
            samples,
            features=np.concatenate(features),
        )

    @property
    def _num_alternatives(self) -> int:
        """Of its likeliest tokens, those that an output must report: a leaf may be any but the one drawn."""
        return min(self._max_branches, len(self._target_ids))

    def _add(self, line: _Line, sampled: SampledRows, output: int, logits: Features) -> None:
        """Adds the token that an output draws to the chain, and its best alternatives as leaves."""
        tokens = self._target_ids[sampled.top_tokens[output]].tolist()
        best = list(zip(tokens, map(_confidence, sampled.top_logprobs[output].tolist()), strict=True))
        chosen = best[0] if self._takes_likeliest(line.context) else self._draw(line, logits)
        if chosen is None:
            line.is_open = False
            return
        leaves = [leaf for leaf in best if leaf[0] != chosen[0]][: self._max_branches - 1]
        line.leaves += [(len(line.tokens), *leaf) for leaf in leaves]
        line.tokens.append(chosen[0])
        line.confidence.append(chosen[1])
        line.product *= chosen[1]
        line.is_open = len(line.tokens) < line.limit and line.product >= self._min_confidence

    def _takes_likeliest(self, context: Context) -> bool:
        record, params = context.record[0], context.params
        if record["temperature"] > 0:
            return self._exact
        is_penalised = record["presence_penalty"] or record["frequency_penalty"] or record["repetition_penalty"] != 1
        return not (is_penalised or params.logit_bias or params.min_tokens or params.structure)

    def _draw(self, line: _Line, logits: Features) -> tuple[int, float] | None:
        """A token as the target would draw it from these logits, and its probability; None where it could not."""
        self._logits[0, self._target_ids] = logits
        rows = line.context.record.copy()
        rows["position"] = len(line.context.tokens) + len(line.tokens)
        rows["num_logprobs"] = 0
        lists = ListsBuilder(rows)
        line.context.add_lists(lists, 0, line.tokens)
        sampled = self._sample(self._logits, lists.build())
        if sampled.status is not None and sampled.status[0]:
            return None
        return int(sampled.tokens[0]), _confidence(float(sampled.logprobs[0]))


def _confidence(logprob: float) -> float:
    """A probability as ``Draft`` wants it."""
    return min(1.0, max(_LEAST, math.exp(logprob)))
