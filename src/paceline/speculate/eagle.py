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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.executors.base import Executor, StepPlan
from paceline.kv.manager import KVManager
from paceline.kv.radix import TOKEN_BYTES
from paceline.sampling.draw import sample_reference
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import MAX_LOGPROBS, SampledRows, SampleRows, greedy_rows
from paceline.speculate.draft import MAX_NODES, Context, Draft
from paceline.speculate.draft_line import MIN_CONFIDENCE, Line, confidence_of, likeliest, step_plan
from paceline.speculate.held_features import Features, HeldFeatures
from paceline.speculate.hidden import HiddenRows

MAX_WAITING = 2048
"""Hidden states of a request that are kept, at most, until it is drafted for."""

_NEVER = -1e6
"""The logit of a token that the head does not know. Finite: the sampler takes infinity for a fault."""

Sample = Callable[[NDArray[np.float32], SampleRows], SampledRows]


@dataclass(eq=False, kw_only=True)
class _Line(Line):
    """A line whose rows have features [known rows behind ``start``, hidden], all that were not computed before; those
    of drafted tokens have ``hidden`` [hidden], the head's own at its last row, instead."""

    held: HeldFeatures
    features: Features
    start: int
    hidden: Features | None = None

    def scheduled_features(self) -> Features:
        """Of the step's rows, which are all of known tokens, or the one of the last drafted."""
        if self.tokens:
            assert self.num_scheduled == 1
            assert self.hidden is not None
            return self.hidden[None]
        at = self.num_computed - self.start
        return self.features[at : at + self.num_scheduled]


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
        self._held: dict[int, HeldFeatures] = {}  # the one that was not asked for the longest first

    def observe_hidden(self, step: Sequence[HiddenRows]) -> None:
        """See ``HiddenObserver``."""
        for rows in step:
            held = self._held.get(rows.context.request_id)
            if held is None:
                held = self._held[rows.context.request_id] = HeldFeatures(rows.position)
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
        assert held.slot is not None
        return _Line(
            context=context,
            num_known=held.num_computed + len(features),
            limit=limit,
            max_nodes=max_nodes,
            first=held.first + 1,
            slot=held.slot,
            num_computed=held.num_computed,
            held=held,
            features=features,
            start=held.num_computed,
        )

    def _place(self, held: HeldFeatures, num_rows: int, asked: set[int]) -> bool:
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
        drawing = [line for line in lines if line.is_drawing]
        samples = greedy_rows(len(drawing))
        samples.rows["position"] = [line.num_rows for line in drawing]
        samples.rows["num_logprobs"] = self._num_alternatives
        features = np.concatenate([line.scheduled_features() for line in lines])
        return step_plan(lines, self.kv.table, samples, features=features)

    @property
    def _num_alternatives(self) -> int:
        """Of its likeliest tokens, those that an output must report: a leaf may be any but the one drawn."""
        return min(self._max_branches, len(self._target_ids))

    def _add(self, line: _Line, sampled: SampledRows, output: int, logits: Features) -> None:
        """Adds the token that an output draws to the chain, and its best alternatives as leaves."""
        tokens, logprobs = self._target_ids[sampled.top_tokens[output]].tolist(), sampled.top_logprobs[output].tolist()
        chosen: tuple[int, float] | None = tokens[0], logprobs[0]
        if not self._takes_likeliest(line.context):
            chosen = self._draw(line, logits)
        if chosen is None:
            line.is_open = False
            return
        token, logprob = chosen
        others = likeliest(tokens, logprobs, token, self._max_branches - 1)
        line.add(token, confidence_of(math.exp(logprob)), self._min_confidence, others)

    def _takes_likeliest(self, context: Context) -> bool:
        record, params = context.record[0], context.params
        if record["temperature"] > 0:
            return self._exact
        is_penalised = record["presence_penalty"] or record["frequency_penalty"] or record["repetition_penalty"] != 1
        return not (is_penalised or params.logit_bias or params.min_tokens or params.structure)

    def _draw(self, line: _Line, logits: Features) -> tuple[int, float] | None:
        """A token as the target would draw it from these logits, and its log-probability; None where it could not."""
        self._logits[0, self._target_ids] = logits
        rows = line.context.record.copy()
        rows["position"] = len(line.context.tokens) + len(line.tokens)
        rows["num_logprobs"] = 0
        lists = ListsBuilder(rows)
        line.context.add_lists(lists, 0, line.tokens)
        sampled = self._sample(self._logits, lists.build())
        if sampled.status is not None and sampled.status[0]:
            return None
        return int(sampled.tokens[0]), float(sampled.logprobs[0])
