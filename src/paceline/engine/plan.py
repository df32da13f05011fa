"""From a schedule to the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config import PAGE_TOKENS
from paceline.engine.request import Request
from paceline.executors.base import StepPlan
from paceline.kv.manager import Fork, KVManager
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import SAMPLE_ROW, SampleRows, greedy_rows
from paceline.speculate.draft import Draft

_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)
_NO_PAIRS = np.zeros((0, 2), np.int32)


@dataclass
class _Branches:
    """The branches of a step's drafts: each is a sequence more, whose first rows another one computes.

    slots      of the page table of every sequence;  forks  (sequence, pages instead of that table's)
    kv_writes  (row, sequence) whose pages get the row's keys and values too
    """

    slots: list[int] = field(default_factory=list)
    forks: list[tuple[int, Fork]] = field(default_factory=list)
    kv_writes: list[tuple[int, int]] = field(default_factory=list)


class PlanBuilder:
    """Builds ``StepPlan``s in arrays that it keeps: a plan is valid until the next one is built.

    Each running request's sampling record lies ready in ``_records`` at its slot (``admit``); a step gathers records
    and sets positions. A step that decodes the same plain requests over the same pages as the one before reuses its
    plan and only moves tokens and positions on: once an executor has swept the weights through the caches, every array
    that Python touches costs microseconds (building took 62 µs after such a sweep, reuse takes 10).
    """

    def __init__(self, kv: KVManager, *, max_rows: int, max_outputs: int) -> None:
        max_batch = len(kv.table)
        self._kv = kv
        self._page_table = kv.table
        self._last: StepPlan | None = None  # the plan before, when it only decoded plain requests
        self._last_requests: list[Request] = []
        self._last_changes = 0
        self._last_moves = (
            0  # tokens that are left on the pages in its table: a draft may have got the next one already
        )
        self._tokens = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._row_starts = np.zeros(max_rows + 1, np.int32)
        self._logit_rows = np.zeros(max_outputs, np.int32)
        self._count = np.arange(max(max_rows, max_outputs) + 1, dtype=np.int32)
        self._records = np.zeros(max_batch, SAMPLE_ROW)
        self._forced_record = greedy_rows(1).rows
        self._rows = np.zeros(max_outputs, SAMPLE_ROW)
        self._row_positions = self._rows[
            "position"
        ]  # views: indexing a structured array by name costs more than a small copy

    def admit(self, request: Request) -> None:
        """Takes the record of a request that has just got its slot."""
        self._records[request.slot] = request.record[0]

    def build(self, requests: list[Request]) -> StepPlan:
        """The plan that computes ``num_scheduled`` rows of each request, in that order, once the pages that the manager
        lists are copied."""
        if (
            self._last is not None
            and requests == self._last_requests
            and self._kv.num_changes == self._last_changes
            and self._last_moves > 0
            and all(request.draft is None for request in requests)
        ):
            return self._move_on(self._last, requests)
        slots = [request.slot or 0 for request in requests]  # never None here; mypy cannot know
        branches: _Branches | None = None
        plain = all(request.is_plain for request in requests)
        num_rows = sum([request.num_scheduled for request in requests])
        if num_rows == len(requests) and all(request.num_outputs == 1 for request in requests):
            samples = self._build_decodes(requests, slots, plain)
            row_starts = logit_rows = self._count
            num_outputs = num_rows
            last = int(self._positions[:num_rows].max()) if num_rows > 1 else requests[0].num_computed
        else:
            branches = _Branches()
            num_outputs, last = self._build_chunks(requests, branches)
            slots = branches.slots
            samples = self._samples(requests, num_outputs, plain)
            row_starts, logit_rows = self._row_starts, self._logit_rows
        num_pages = last // PAGE_TOKENS + 1
        if len(slots) == 1:
            table = self._page_table[slots[0] : slots[0] + 1, :num_pages]
        else:
            table = self._page_table[slots, :num_pages]
            for sequence, fork in branches.forks if branches else ():
                end = min(num_pages, fork.first + len(fork.pages))
                table[sequence, fork.first : end] = fork.pages[: end - fork.first]
        plan = StepPlan(
            self._tokens[:num_rows],
            self._positions[:num_rows],
            row_starts[: len(slots) + 1],
            table,
            logit_rows[:num_outputs],
            samples,
            np.array(self._kv.page_copies, np.int32) if self._kv.page_copies else _NO_PAIRS,
            np.array(sorted(branches.kv_writes), np.int32) if branches and branches.kv_writes else _NO_PAIRS,
        )
        # A sequence whose next row lies on a new page makes the tables change, so the plan is not used again then.
        # Nor is one that copies pages, which must happen once.
        decodes = plain and num_rows == len(requests) and all(r.num_computed + 1 == len(r.tokens) for r in requests)
        self._last = plan if decodes and not self._kv.page_copies else None
        self._last_requests, self._last_changes = requests, self._kv.num_changes
        self._last_moves = num_pages * PAGE_TOKENS - 1 - last
        return plan

    def _move_on(self, plan: StepPlan, requests: Sequence[Request]) -> StepPlan:
        """The plan before, one token later."""
        self._last_moves -= 1
        if len(requests) == 1:
            request = requests[0]
            position = request.num_computed
            self._tokens[0] = request.tokens[position]
            self._positions[0] = position
            self._row_positions[0] = position + 1
        else:
            count = len(requests)
            self._tokens[:count] = [request.tokens[-1] for request in requests]
            self._positions[:count] += 1
            self._row_positions[:count] += 1
        return plan

    def _build_decodes(self, requests: Sequence[Request], slots: list[int], plain: bool) -> SampleRows:
        """The common step: one row and one token of every request."""
        count = len(requests)
        if count == 1:
            request = requests[0]
            position = request.num_computed
            self._tokens[0] = request.tokens[position]
            self._positions[0] = position
            self._rows[0] = self._records[request.slot]
            self._row_positions[0] = position + 1
        else:
            self._tokens[:count] = [request.tokens[request.num_computed] for request in requests]
            self._positions[:count] = [request.num_computed for request in requests]
            self._rows[:count] = self._records[slots]
            np.add(self._positions[:count], 1, out=self._row_positions[:count], casting="unsafe")
        for at, request in enumerate(
            requests
        ):  # a chunk may be one row inside a prompt whose log-probabilities are wanted
            if request.prompt_logprobs is not None and len(request.prompt_logprobs) < request.num_prompt:
                self._force(at, request, len(request.prompt_logprobs))
        return self._samples(requests, count, plain)

    def _build_chunks(self, requests: Sequence[Request], branches: _Branches) -> tuple[int, int]:
        """Steps that prefill or verify drafts; returns the number of outputs and the last position."""
        row = output = last = 0
        for request in requests:
            if request.draft is not None:
                last = max(last, self._build_draft(request, request.draft, row, output, branches))
                row += request.num_scheduled
                output += request.num_outputs
                continue
            start, count = request.num_computed, request.num_scheduled
            end = start + count
            self._tokens[row : row + count] = request.tokens[start:end]
            self._positions[row : row + count] = range(start, end) if count < 8 else np.arange(start, end)
            self._row_starts[len(branches.slots)] = row
            branches.slots.append(request.slot or 0)
            for position in range(end - request.num_outputs, end):
                self._logit_rows[output] = row + position - start
                if position + 1 < len(request.tokens):
                    self._force(output, request, position + 1)
                else:
                    self._rows[output] = self._records[request.slot]
                    self._row_positions[output] = position + 1
                output += 1
            row += count
            last = max(last, end - 1)
        self._row_starts[len(branches.slots)] = row
        return output, last

    def _build_draft(self, request: Request, draft: Draft, row: int, output: int, branches: _Branches) -> int:
        """The rows of a request's last token and its draft, each an output; returns the last position."""
        count = len(draft) + 1
        positions = np.array([0, *draft.depths()], np.int32) + request.num_computed
        self._tokens[row : row + count] = [request.tokens[-1], *draft.tokens]
        self._positions[row : row + count] = positions
        self._logit_rows[output : output + count] = self._count[row : row + count]
        self._rows[output : output + count] = self._records[request.slot]
        self._row_positions[output : output + count] = positions + 1
        for branch, start in enumerate(draft.branch_starts()):
            sequence = len(branches.slots)
            self._row_starts[sequence] = row + start
            branches.slots.append(request.slot or 0)
            if branch > 0:
                branches.forks.append((sequence, request.forks[branch - 1]))
                before = [0, *draft.path(draft.parents[start - 1])]
                branches.kv_writes += [(row + other, sequence) for other in before]
        return int(positions.max())

    def _force(self, output: int, request: Request, position: int) -> None:
        """An output that reports the log-probability of the prompt's token at ``position``."""
        rows: Any = self._rows
        rows[output] = self._forced_record[0]
        rows[output]["seed"] = request.record[0]["seed"]  # draws nothing here: it says whose output this is
        rows[output]["forced"] = request.tokens[position]
        rows[output]["position"] = position
        rows[output]["num_logprobs"] = request.params.prompt_logprobs

    def _samples(self, requests: Sequence[Request], num_outputs: int, plain: bool) -> SampleRows:
        """Records and lists of the step's outputs; each request's own token is its last output, but with a
        draft all are."""
        rows = self._rows[:num_outputs]
        if plain:
            return SampleRows(rows, _NO_IDS, _NO_IDS, _NO_IDS, _NO_VALUES, _NO_IDS)
        lists = ListsBuilder(rows)
        end = 0
        for request in requests:
            end += request.num_outputs
            if request.draft is not None:
                if not request.is_plain:
                    request.add_draft_lists(lists, end - request.num_outputs, request.draft)
            elif request.num_outputs > 0 and request.num_computed + request.num_scheduled == len(request.tokens):
                request.add_lists(lists, end - 1)
        return lists.build()
