"""A model in float32 throughout, on the weights that its file holds: what quality is measured against.

It runs the graph with the ops' own definitions, all windows of a text in one pass, except for attention, which is the
same sum as matrix products. ``executors.reference`` with float activations gives the same but rounds keys and values
to 16 bits and takes a Python loop over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.executors.base import StepPlan
from paceline.kv.layout import pages_for
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph, Node
from paceline.ops.reference import KeyValues, Rounding, Step
from paceline.ops.spec import OPS
from paceline.sampling.rows import greedy_rows
from paceline.weights.blocks import dequantize
from paceline.weights.packing import rope_permutation
from paceline.weights.raw import Checkpoint

Table = NDArray[np.float32]
Tokens = NDArray[np.int32]


class DequantisedWeights:
    """A checkpoint's weights as float32 in the order that the graph wants, made when read and not kept."""

    def __init__(self, checkpoint: Checkpoint, graph: Graph) -> None:
        self._checkpoint = checkpoint
        self._graph = graph

    def values(self, name: str) -> Table:
        """The matrix [outputs, inputs] or vector."""
        raw, spec, model = self._checkpoint.tensor(name), self._graph.weights[name], self._checkpoint.config
        shape = raw.shape if len(raw.shape) == 2 else (1, *raw.shape)
        values = dequantize(replace(raw, shape=shape)).reshape(raw.shape)
        if spec.rope_heads and not self._checkpoint.interleaved_rope:
            values = values[rope_permutation(spec.rope_heads, model.head_dim, model.rope.dim)]
        return values

    def rounding(self, name: str) -> Rounding | None:
        """None: nothing is rounded."""
        return None


def windows_plan(windows: Tokens) -> StepPlan:
    """All of ``windows`` [count, tokens] as one step, a sequence each, with logits everywhere."""
    count, length = windows.shape
    pages = pages_for(length)
    return StepPlan(
        tokens=windows.reshape(-1),
        positions=np.tile(np.arange(length, dtype=np.int32), count),
        row_starts=np.arange(count + 1, dtype=np.int32) * np.int32(length),
        page_table=np.arange(count * pages, dtype=np.int32).reshape(count, pages),
        logit_rows=np.arange(count * length, dtype=np.int32),
        samples=greedy_rows(count * length),
    )


def window_attention(node: Node, inputs: Sequence[Table], step: Step, *, window_tokens: int) -> list[Table]:
    """``ops.reference.attention`` for whole windows that start at position 0, as matrix products."""
    model, layer = step.model, node.attributes["layer"]
    group = model.num_heads // model.num_kv_heads
    position = np.arange(window_tokens)
    seen = position[None, :] <= position[:, None]
    if model.sliding_window is not None:
        seen &= position[None, :] > position[:, None] - model.sliding_window
    out = np.empty_like(inputs[0])
    for index, pages in enumerate(step.page_table):
        rows = slice(index * window_tokens, (index + 1) * window_tokens)
        q = inputs[0][rows].reshape(window_tokens, model.num_kv_heads, group, model.head_dim)
        results = np.empty_like(q)
        for head in range(model.num_kv_heads):
            keys = step.kv.keys[layer, pages, head].reshape(-1, model.head_dim)[:window_tokens]
            values = step.kv.values[layer, pages, head].reshape(-1, model.head_dim)[:window_tokens]
            for member in range(group):
                scores = np.where(seen, q[:, head, member] @ keys.T, np.float32(-np.inf))
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                results[:, head, member] = weights @ values / weights.sum(axis=1, keepdims=True)
        out[rows] = results.reshape(window_tokens, -1)
    return [out]


class Float32Reference:
    """The final hidden rows of all windows, computed layer by layer so that each weight is dequantised once; logits on
    demand, a window at a time.
    """

    def __init__(self, checkpoint: Checkpoint, windows: Tokens, report: Callable[[int, int], None]) -> None:
        graph, model = build_graph(checkpoint.config), checkpoint.config
        count, self._length = windows.shape
        plan = windows_plan(windows)
        shape = (model.num_layers, plan.page_table.size, model.num_kv_heads, PAGE_TOKENS, model.head_dim)
        kv = KeyValues(np.zeros(shape, np.float32), np.zeros(shape, np.float32), "f32")
        sequences = np.repeat(np.arange(count, dtype=np.int32), self._length)
        weights = DequantisedWeights(checkpoint, graph)
        step = Step(
            model, weights, kv, plan.tokens, plan.positions, sequences, plan.page_table, plan.logit_rows, "float"
        )
        last_use = {value.name: index for index, node in enumerate(graph.nodes) for value in node.inputs}
        values: dict[str, Table] = {}
        *body, head = graph.nodes
        for index, node in enumerate(body):
            inputs = [values[value.name] for value in node.inputs]
            if node.op == "attention":
                outputs = window_attention(node, inputs, step, window_tokens=self._length)
            else:
                outputs = OPS[node.op].reference(node, inputs, step)
            values |= {value.name: table for value, table in zip(node.outputs, outputs, strict=True)}
            values = {name: table for name, table in values.items() if last_use.get(name, -1) > index}
            report(index + 1, len(body))
        assert head.op == "linear", head.op
        self._hidden = values[head.inputs[0].name]
        self._head = weights.values(head.weights[0])

    def logits(self, window: int) -> Table:
        """Logits of a window."""
        return self._hidden[window * self._length : (window + 1) * self._length] @ self._head.T
