"""From a schedule to the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.config import PAGE_TOKENS
from paceline.engine.request import Request
from paceline.executors.base import StepPlan
from paceline.kv.manager import KVManager
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import SAMPLE_ROW, SampleRows, greedy_rows

_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)
_NO_COPIES = np.zeros((0, 2), np.int32)


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
        self._tokens = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._row_starts = np.zeros(max_batch + 1, np.int32)
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
        if self._last is not None and requests == self._last_requests and self._kv.num_changes == self._last_changes:
            return self._move_on(self._last, requests)
        slots = [request.slot or 0 for request in requests]  # never None here; mypy cannot know
        plain = all(request.is_plain for request in requests)
        num_rows = sum([request.num_scheduled for request in requests])
        if num_rows == len(requests) and all(request.num_outputs == 1 for request in requests):
            samples = self._build_decodes(requests, slots, plain)
            row_starts = logit_rows = self._count
            num_outputs = num_rows
            last = int(self._positions[:num_rows].max()) if num_rows > 1 else requests[0].num_computed
        else:
            num_outputs, last = self._build_chunks(requests)
            samples = self._samples(requests, num_outputs, plain)
            row_starts, logit_rows = self._row_starts, self._logit_rows
        num_pages = last // PAGE_TOKENS + 1
        if len(slots) == 1:
            table = self._page_table[slots[0] : slots[0] + 1, :num_pages]
        else:
            table = self._page_table[slots, :num_pages]
        plan = StepPlan(
            self._tokens[:num_rows],
            self._positions[:num_rows],
            row_starts[: len(slots) + 1],
            table,
            logit_rows[:num_outputs],
            samples,
            np.array(self._kv.page_copies, np.int32) if self._kv.page_copies else _NO_COPIES,
        )
        # A sequence whose next row lies on a new page makes the tables change, so the plan is not used again then.
        # Nor is one that copies pages, which must happen once.
        decodes = plain and num_rows == len(requests) and all(r.num_computed + 1 == len(r.tokens) for r in requests)
        self._last = plan if decodes and not self._kv.page_copies else None
        self._last_requests, self._last_changes = requests, self._kv.num_changes
        return plan

    def _move_on(self, plan: StepPlan, requests: Sequence[Request]) -> StepPlan:
        """The plan before, one token later."""
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

    def _build_chunks(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Steps that prefill; returns the number of outputs and the last position."""
        row = output = last = 0
        for sequence, request in enumerate(requests):
            start, count = request.num_computed, request.num_scheduled
            end = start + count
            self._tokens[row : row + count] = request.tokens[start:end]
            self._positions[row : row + count] = range(start, end) if count < 8 else np.arange(start, end)
            self._row_starts[sequence] = row
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
        self._row_starts[len(requests)] = row
        return output, last

    def _force(self, output: int, request: Request, position: int) -> None:
        """An output that reports the log-probability of the prompt's token at ``position``."""
        rows: Any = self._rows
        rows[output] = self._forced_record[0]
        rows[output]["seed"] = request.record[0]["seed"]  # draws nothing here: it says whose output this is
        rows[output]["forced"] = request.tokens[position]
        rows[output]["position"] = position
        rows[output]["num_logprobs"] = request.params.prompt_logprobs

    def _samples(self, requests: Sequence[Request], num_outputs: int, plain: bool) -> SampleRows:
        """Records and lists of the step's outputs; each request's own token is its last output."""
        rows = self._rows[:num_outputs]
        if plain:
            return SampleRows(rows, _NO_IDS, _NO_IDS, _NO_IDS, _NO_VALUES, _NO_IDS)
        lists = ListsBuilder(rows)
        output = -1
        for request in requests:
            output += request.num_outputs
            if request.num_outputs > 0 and request.num_computed + request.num_scheduled == len(request.tokens):
                request.add_lists(lists, output)
        return lists.build()
