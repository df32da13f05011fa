"""Decode steps as CUDA graphs: recorded once for some numbers of rows, then replayed in one launch.

A step of one token each is hundreds of small kernels, and on a fast GPU launching them from Python takes longer than
they run. A graph has the addresses of its tensors fixed, so a step's numbers are copied into tensors that stay, and
what it makes is read from others. A step that is not one of those goes the ordinary way (``fits`` says which are).

Rows that are recorded but not wanted repeat the last one: they write the same keys and values to the same places.

Checked by: tests/unit/test_cuda_graphs.py with a recorder that runs anew, tests/gpu/test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.config import PAGE_TOKENS
from paceline.executors.base import StepPlan
from paceline.executors.torch.operations import Context
from paceline.executors.torch.pages import PagePool
from paceline.executors.triton.attention_rows import AttentionRows, splits_for
from paceline.ops.graph import Graph

SCRATCH_BYTES = 1 << 30
"""Largest partial results of attention that a graph may need; they grow with rows times context."""

ASKING_OPS = {"features", "experts_glu", "experts_down"}
"""Ops that cannot be recorded: the plan brings their input, or they ask the device which experts were chosen."""

Values = dict[str, Tensor]


class Attend(Protocol):
    """Attention over pages in place; ``executors.triton.paged_attention`` has one."""

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: AttentionRows,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """softmax(q k^T) v of each row over what it sees."""
        ...


@dataclass(frozen=True)
class Recorded:
    """A graph: ``replay`` computes ``values`` anew, in place."""

    replay: Callable[[], object]
    values: Values


Record = Callable[[Callable[[], Values]], Recorded]


@dataclass(frozen=True)
class Recording:
    """How decode steps are recorded, and the attention that can be."""

    record: Record
    attend: Attend


class CudaRecorder:
    """Records on a device. All graphs share their memory, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: object = None

    def __call__(self, run: Callable[[], Values]) -> Recorded:
        """``run`` twice as it is, so that kernels are compiled and libraries have their workspaces, then recorded."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, such as one that looks how much memory is free.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                values = run()
            self._memory = graph.pool()
        return Recorded(graph.replay, values)


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that are recorded: 1, 2, 4, 8, multiples of 8, from 64 on of 32, and ``max_rows``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def fits(plan: StepPlan, max_rows: int) -> bool:
    """Whether the plan is a step that is recorded: one row a sequence, each with an output, nothing written twice."""
    rows = len(plan.tokens)
    one_each = len(plan.row_starts) == rows + 1 and len(plan.logit_rows) == rows
    return one_each and 0 < rows <= max_rows and not len(plan.kv_writes) and plan.features is None


class DecodeRows:
    """Tensors that stay, of ``size`` rows; ``Context`` of a recorded step."""

    def __init__(self, pool: PagePool, attend: Attend, size: int, context_length: int) -> None:
        device = pool.device
        self._pool = pool
        self._attend = attend
        self._numbers = torch.zeros((4, size), dtype=torch.int64, device=device)
        self._table = torch.zeros((size, -(-context_length // PAGE_TOKENS)), dtype=torch.int32, device=device)
        each = torch.arange(size, dtype=torch.int32, device=device)
        short = torch.zeros(size, dtype=torch.int32, device=device)
        self._rows = AttentionRows(each, torch.ones_like(each), short, each, self._table, splits_for(context_length))
        self.size = size
        self.tokens, self.positions, self._pages, self._slots = self._numbers

    def fill(self, plan: StepPlan) -> None:
        """Takes the numbers of a plan that ``fits``; the last row is repeated."""
        rows = np.minimum(np.arange(self.size), len(plan.tokens) - 1)
        positions = plan.positions[rows]
        pages = plan.page_table[rows, positions // PAGE_TOKENS]
        numbers = np.stack([plan.tokens[rows], positions, pages, positions % PAGE_TOKENS])
        width = min(plan.page_table.shape[1], self._table.shape[1])
        self._numbers.copy_(torch.from_numpy(numbers))
        self._table[:, :width].copy_(torch.from_numpy(plan.page_table[rows, :width]))
        self._rows.positions.copy_(self.positions)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ``Context``."""
        self._pool.write(layer, k, v, self._pages, self._slots)

    def attend(
        self, layer: int, q: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """See ``Context``."""
        keys, values = self._pool.numbers[:, layer, 0], self._pool.numbers[:, layer, 1]
        return self._attend(q, keys, values, self._rows, window=window, softcap=softcap, sinks=sinks)


class DecodeGraphs:
    """The graphs of one executor, each recorded when a step first needs it."""

    def __init__(
        self,
        recording: Recording,
        run: Callable[[Context, Tensor, Tensor], Values],
        pool: PagePool,
        *,
        max_rows: int,
        context_length: int,
    ) -> None:
        """``run`` computes a step over a context, tokens [rows] i64 and positions [rows] i64, without asking the device
        for a number."""
        self._recording = recording
        self._run = run
        self._pool = pool
        self._context_length = context_length
        row_bytes = 4 * splits_for(context_length) * pool.model.num_heads * pool.model.head_dim
        self.sizes = bucket_sizes(max(1, min(max_rows, SCRATCH_BYTES // row_bytes)))
        self._graphs: dict[int, tuple[DecodeRows, Recorded]] = {}

    @staticmethod
    def are_possible(graph: Graph, pool: PagePool) -> bool:
        """Whether steps of that graph over that pool can be recorded: no experts, no features, no int8 pages."""
        return pool.scales is None and not ASKING_OPS.intersection(node.op for node in graph.nodes)

    def run(self, plan: StepPlan) -> Values | None:
        """What the step computes, valid until the next; None for a plan that is to go the ordinary way."""
        if not fits(plan, self.sizes[-1]) or int(plan.positions.max()) >= self._context_length:
            return None
        rows = len(plan.tokens)
        size = next(size for size in self.sizes if size >= rows)
        if size not in self._graphs:
            held = DecodeRows(self._pool, self._recording.attend, size, self._context_length)
            held.fill(plan)
            recorded = self._recording.record(lambda: self._run(held, held.tokens, held.positions))
            self._graphs[size] = held, recorded
        held, recorded = self._graphs[size]
        held.fill(plan)
        recorded.replay()
        return {name: value[:rows] for name, value in recorded.values.items()}

    @property
    def recorded(self) -> tuple[int, ...]:
        """Numbers of rows that have a graph."""
        return tuple(sorted(self._graphs))
