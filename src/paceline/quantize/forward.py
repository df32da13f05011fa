"""Whole sequences through a model's graph, one stage at a time, in float32.

A stage begins with a ``linear`` node and goes on up to the next one, so that between two stages stands the input of the
next matrices. A method walks the stages: it looks at the inputs, changes the stage's matrices, then runs the stage with
what they have become. In memory are one stage's weights and the values that later stages read.

Departures: attention is computed over a whole sequence at once, not over pages, and keys and values are not rounded to
the KV format; sums are in float32. Measured on two cores of a Zen 3, 8,192 tokens of SmolLM2 take half as long through
these matrix products as through the native kernels with f32 weights, which are made for a few rows at a time.
Checked by: tests/unit/test_quantize_forward.py, against the reference executor with float activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import Activation, ModelConfig, RopeConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph, Node
from paceline.ops.reference import Table, inverse_frequencies, rotate
from paceline.weights.blocks import dequantize
from paceline.weights.packing import rope_permutation
from paceline.weights.raw import Checkpoint

Values = dict[str, Table]
"""Value name -> table [sequences, tokens, width] f32."""

Observer = Callable[[slice, Values], None]
"""Called with the sequences and all values of a stage for them, those that it read and those that it made."""

CHUNK_TOKENS = 2048
"""Tokens that go through a stage together: their widest values stay within some tens of megabytes."""


@dataclass(frozen=True)
class Stage:
    """Some nodes in a row; ``reads`` are the values from earlier stages, ``leaves`` those that later stages read."""

    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def linear(self) -> Node | None:
        """The matrix products that it begins with; the first stage, of the embedding, has none."""
        return self.nodes[0] if self.nodes[0].op == "linear" else None

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the matrices that it begins with; they share their input."""
        return () if self.linear is None else self.linear.weights[: len(self.linear.outputs)]

    @property
    def input(self) -> str:
        """The value that its matrices are multiplied with."""
        assert self.linear is not None
        return self.linear.inputs[0].name


def stages_of(graph: Graph) -> tuple[Stage, ...]:
    """All nodes up to the last layer's end, cut before each ``linear``."""
    cut: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node.op == "select_outputs":
            break
        if node.op == "linear":
            cut.append([])
        cut[-1].append(node)
    needed = {graph.hidden.name}
    stages: list[Stage] = []
    for nodes in reversed(cut):
        made = {value.name for node in nodes for value in node.outputs}
        read = {value.name for node in nodes for value in node.inputs} - made
        stages.append(Stage(tuple(nodes), tuple(sorted(read)), tuple(sorted(made & needed))))
        needed = (needed - made) | read
    return tuple(reversed(stages))


class GraphWeights:
    """The weights of a checkpoint as float32, in the order in which the graph wants rows (rotary pairs beside each
    other), unless ``changed`` has another table, in the checkpoint's order, for a name."""

    def __init__(self, checkpoint: Checkpoint, graph: Graph, changed: Callable[[str], Table | None]) -> None:
        self._checkpoint = checkpoint
        self._graph = graph
        self._changed = changed

    def values(self, name: str) -> Table:
        """The matrix [outputs, inputs] or the vector."""
        table = self._changed(name)
        if table is None:
            table = checkpoint_values(self._checkpoint, name)
        rows = self._rope_rows(name)
        return np.ascontiguousarray(table if rows is None else table[rows])

    def file_order(self, name: str, table: NDArray[Any]) -> NDArray[Any]:
        """A table with a row for each output of the matrix, from the graph's order into the checkpoint's."""
        rows = self._rope_rows(name)
        if rows is None:
            return table
        restored = np.empty_like(table)
        restored[rows] = table
        return restored

    def _rope_rows(self, name: str) -> NDArray[np.int32] | None:
        heads = self._graph.weights[name].rope_heads
        if heads == 0 or self._checkpoint.interleaved_rope:
            return None
        model = self._checkpoint.config
        return rope_permutation(heads, model.head_dim, model.rope.dim)


def checkpoint_values(checkpoint: Checkpoint, name: str) -> Table:
    """A tensor of the checkpoint as float32, in its own order. CheckpointError for a value that is not finite."""
    table = dequantize(checkpoint.tensor(name))
    if not np.isfinite(table).all():
        raise CheckpointError(checkpoint.path, "a value is infinite or not a number", tensor=name)
    return np.asarray(table, np.float32)


class SequenceForward:
    """Runs stages of one model over sequences of equal length, each from its own position 0."""

    def __init__(self, checkpoint: Checkpoint, changed: Callable[[str], Table | None] = lambda name: None) -> None:
        """``changed`` gives tables that stand in for the checkpoint's. UnsupportedError for a mixture of experts."""
        if checkpoint.config.experts is not None:
            raise UnsupportedError(f"{checkpoint.path}: a mixture of experts; Paceline quantises dense models")
        self.graph = build_graph(checkpoint.config.at_context(checkpoint.config.context_length))
        self.stages = stages_of(self.graph)
        self.weights = GraphWeights(checkpoint, self.graph, changed)
        self._model = checkpoint.config

    def run(
        self,
        stage: Stage,
        values: Values,
        tokens: NDArray[np.int32],
        *,
        linear_input: Callable[[Table], Table] | None = None,
        observe: Observer | None = None,
    ) -> Values:
        """What the stage leaves, for tokens [sequences, length]; values that no later stage reads are dropped.

        ``values`` is modified: what only this stage read leaves it. ``linear_input`` changes what the matrices are
        multiplied with (rounding to int8). ``observe`` sees the values of some sequences at a time.
        """
        weights = {name: self.weights.values(name) for node in stage.nodes for name in node.weights}
        left: Values = {}
        for part in chunks(tokens.shape):
            local = {name: values[name][part] for name in stage.reads}
            if linear_input is not None and stage.linear is not None:
                local[stage.input] = linear_input(local[stage.input])
            _run_nodes(stage.nodes, local, tokens[part], weights, self._model)
            for name in stage.leaves:
                if name not in left:
                    left[name] = np.empty((*tokens.shape, local[name].shape[-1]), np.float32)
                left[name][part] = local[name]
            if observe is not None:
                observe(part, local)
        position = self.stages.index(stage)
        later = {name for other in self.stages[position + 1 :] for name in other.reads} | {self.graph.hidden.name}
        for name in [name for name in values if name not in later]:
            del values[name]
        values.update(left)
        return left


def chunks(shape: tuple[int, int]) -> Iterator[slice]:
    """Slices of sequences that are worked on together."""
    sequences, length = shape
    step = max(1, CHUNK_TOKENS // length)
    for start in range(0, sequences, step):
        yield slice(start, min(start + step, sequences))


def _run_nodes(
    nodes: tuple[Node, ...],
    values: Values,
    tokens: NDArray[np.int32],
    weights: Mapping[str, Table],
    model: ModelConfig,
) -> None:
    """Adds what the nodes make to ``values``; keys and values of attention live in it for as long as it does."""
    for node in nodes:
        inputs, has = [values[value.name] for value in node.inputs], node.attributes
        if node.op == "embed":
            outputs = [weights[node.weights[0]][tokens] * np.float32(has["scale"])]
        elif node.op == "rms_norm":
            outputs = [rms_norm(inputs[0], weights[node.weights[0]], has["eps"])]
        elif node.op == "linear":
            outputs = _linear(node, inputs[0], weights)
        elif node.op == "rope_write":
            query, values["keys"], values["values"] = _rope(node, inputs, weights, model)
            outputs = [query]
        elif node.op == "attention":
            options = {name: has[name] for name in ("window", "softcap")}
            sinks = weights[node.weights[0]] if node.weights else None
            outputs = [attend(inputs[0], values["keys"], values["values"], model, **options, sinks=sinks)]
        elif node.op == "glu":
            outputs = [activated(inputs[0], inputs[1], has["activation"])]
        else:
            assert node.op == "add", node.op
            outputs = [inputs[0] + inputs[1]]
        for value, table in zip(node.outputs, outputs, strict=True):
            values[value.name] = table


def activated(gate: Table, up: Table, activation: Activation) -> Table:
    """act(gate) * up, as ``ops.reference`` defines it."""
    with np.errstate(over="ignore"):
        if activation == "silu":
            return np.asarray(gate / (1 + np.exp(-gate)) * up, np.float32)
        if activation == "gelu_tanh":
            inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
            return np.asarray(np.float32(0.5) * gate * (1 + np.tanh(inner)) * up, np.float32)
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        return np.asarray(gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1), np.float32)


def rms_norm(x: Table, weight: Table, eps: float) -> Table:
    """x / sqrt(mean(x^2) + eps) * weight."""
    mean = np.einsum("...k,...k->...", x, x)[..., None] / np.float32(x.shape[-1])
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def _linear(node: Node, x: Table, weights: Mapping[str, Table]) -> list[Table]:
    num_outputs = len(node.outputs)
    flat = x.reshape(-1, x.shape[-1])
    outputs = []
    for index, name in enumerate(node.weights[:num_outputs]):
        y = flat @ weights[name].T
        if node.attributes["num_biases"]:
            y += weights[node.weights[num_outputs + index]]
        if node.attributes["scale"] != 1.0:
            y *= np.float32(node.attributes["scale"])
        outputs.append(y.reshape(*x.shape[:-1], -1))
    return outputs


def _rope(
    node: Node, inputs: list[Table], weights: Mapping[str, Table], model: ModelConfig
) -> tuple[Table, Table, Table]:
    """Rotated queries * scale, rotated keys, values, each [sequences, tokens, width]."""
    sequences, length = inputs[0].shape[:2]
    q, k = (x.reshape(sequences * length, -1, model.head_dim) for x in inputs[:2])
    if node.weights:
        q = rms_norm(q, weights[node.weights[0]], node.attributes["eps"])
        k = rms_norm(k, weights[node.weights[1]], node.attributes["eps"])
    rope: RopeConfig | None = node.attributes["rope"]
    if rope is not None:
        positions = np.tile(np.arange(length, dtype=np.int32), sequences)
        frequencies = inverse_frequencies(rope, model.head_dim)
        q = rotate(q, positions, frequencies, factor=rope.attention_factor)
        k = rotate(k, positions, frequencies, factor=rope.attention_factor)
    q = q * np.float32(node.attributes["scale"])
    return q.reshape(inputs[0].shape), k.reshape(inputs[1].shape), inputs[2]


def attend(
    q: Table,
    keys: Table,
    values: Table,
    model: ModelConfig,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Table | None = None,
) -> Table:
    """softmax(q K^T) V of each head, over the positions up to a row's own within the window; see
    ``ops.reference.attention``.
    """
    sequences, length, width = q.shape
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    rows = np.arange(length)
    hidden = rows[:, None] < rows
    if window is not None:
        hidden |= rows[:, None] - rows >= window
    out = np.empty((sequences, length, heads, dim), np.float32)
    for sequence in range(sequences):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            key = keys[sequence].reshape(length, kv_heads, dim)[:, shared]
            value = values[sequence].reshape(length, kv_heads, dim)[:, shared]
            scores = q[sequence].reshape(length, heads, dim)[:, head] @ key.T
            if softcap is not None:
                scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
            scores[hidden] = -np.inf
            largest = scores.max(axis=1, keepdims=True)
            if sinks is not None:
                largest = np.maximum(largest, sinks[head])
            scores = np.exp(scores - largest)
            total = scores.sum(axis=1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks[head] - largest)
            out[sequence, :, head] = scores @ value / total
    return out.reshape(sequences, length, width)
