"""From a graph to the records of a native program: which nodes fuse, and where each value lives.

Fusions, the reason that a layer needs few barriers: a residual ``add`` becomes the accumulating form of the ``linear``
before it, or of the norm before it, together with the norm that reads the sum; norms and gated products write the int8
form that integer weights read; gate, up and their product are one record when gate and up share a format; a softcap is
the end of its ``linear``. Where weights want activations in another order, or one scale a token, norms and gated
products write floats and a quantise record follows.
"""

from __future__ import annotations

from itertools import groupby

from paceline._native import Program
from paceline.config import ModelConfig, RopeConfig
from paceline.errors import UnsupportedError
from paceline.executors.lowering_experts import ExpertLowering
from paceline.executors.placement import NONE, Lowered, Place, Placement
from paceline.executors.weights import WeightLoader
from paceline.ops.graph import Graph, Node, Value
from paceline.ops.reference import inverse_frequencies
from paceline.weights.packed import TILE


class Lowering:
    """Walks a graph once and appends records to ``program``."""

    def __init__(self, program: Program, graph: Graph, model: ModelConfig, loader: WeightLoader) -> None:
        self._program = program
        self._model = model
        self._graph = graph
        self._at = Placement(program, graph, loader)
        self._experts = ExpertLowering(program, graph, self._at)
        self._ropes: dict[RopeConfig, int] = {}
        self._plans: dict[int | None, int] = {}

    def run(self) -> Lowered:
        """Lowers every node; returns where the values are."""
        for node in self._graph.nodes:
            if node.name in self._at.fused:
                continue
            lower = getattr(self, f"_lower_{node.op}", None) or getattr(self._experts, f"lower_{node.op}", None)
            if lower is None:
                raise UnsupportedError(f"the native executor has no record for {node.op} ({self._model.architecture})")
            lower(node)
        self._at.lowered.logits_buffer = self._at.lowered.places[self._graph.logits.name].buffer
        self._at.lowered.hidden_buffer = self._at.lowered.places[self._graph.hidden.name].buffer
        self._program.sample(self._at.lowered.logits_buffer)
        return self._at.lowered

    # ---- nodes ----

    def _lower_embed(self, node: Node) -> None:
        (matrix,) = self._at.packed(node.weights)
        self._at.lowered.embedding = matrix
        buffer = self._at.buffer("x", node.outputs[0])
        self._program.embed(self._at.matrix(matrix), buffer, node.attributes["scale"])
        self._at.made(node.outputs[0], Place(buffer))

    def _lower_features(self, node: Node) -> None:
        """No record: the executor fills the buffer before a step."""
        self._at.lowered.features_buffer = self._at.buffer("features", node.outputs[0])
        self._at.made(node.outputs[0], Place(self._at.lowered.features_buffer))

    def _lower_rms_norm(self, node: Node) -> None:
        value, reader = node.outputs[0], self._at.only_reader(node)
        if reader is not None and reader.op == "rope_write":
            self._lower_norm_of_heads(node, reader)
            return
        if reader is not None and reader.op == "add":
            self._lower_norm_add(node, reader)
            return
        to_buffer, to_activations = self._at.for_readers("norm", value)
        self._program.norm(
            self._at.place(node.inputs[0]).buffer,
            self._at.vector(node.weights[0]),
            node.attributes["eps"],
            value.width,
            to_buffer,
            to_activations,
        )
        self._at.made(value, Place(to_buffer, 0, to_activations))

    def _lower_norm_of_heads(self, node: Node, rope_write: Node) -> None:
        """Queries or keys, all heads as one row, where the product left them; no barrier between both."""
        value, place = node.outputs[0], self._at.place(node.inputs[0])
        after = self._graph.nodes[self._graph.nodes.index(node) + 1]
        joined = after.op == "rms_norm" and after.outputs[0] in rope_write.inputs
        weight = self._at.vector(node.weights[0])
        self._program.norm_in_place(place.buffer, place.column, weight, node.attributes["eps"], value.width, joined)
        self._at.made(value, place)

    def _lower_norm_add(self, node: Node, add: Node) -> None:
        """The norm, the sum with the residual, and what reads the sum at once: a norm, or integer weights."""
        normed, total = node.outputs[0], add.outputs[0]
        (residual,) = (self._at.place(value) for value in add.inputs if value != normed)
        source = self._at.place(node.inputs[0])
        assert source.column == residual.column == 0, "whole buffers"
        # Not onto the residual: threads that each do all rows would add twice.
        buffer = next(other for role in ("x", "y") if (other := self._at.buffer(role, total)) != residual.buffer)
        following = [reader for reader in self._at.readers[total.name] if reader.op != "add"]
        norm = following[0] if len(following) == 1 and following[0].op == "rms_norm" else None
        if norm is not None:
            to_buffer, to_activations = self._at.for_readers("norm", norm.outputs[0])
        else:
            floats, integers = self._at.forms_for(following)
            to_buffer = buffer if floats else NONE
            to_activations = self._at.activation("sum", total) if integers else NONE
        self._program.norm_add(
            source.buffer,
            self._at.vector(node.weights[0]),
            node.attributes["eps"],
            total.width,
            residual.buffer,
            buffer,
            NONE if norm is None else self._at.vector(norm.weights[0]),
            0.0 if norm is None else norm.attributes["eps"],
            to_buffer,
            to_activations,
        )
        self._at.fused.add(add.name)
        self._at.made(total, Place(buffer, 0, NONE if norm is not None else to_activations))
        if norm is not None:
            self._at.fused.add(norm.name)
            self._at.made(norm.outputs[0], Place(to_buffer, 0, to_activations))

    def _lower_linear(self, node: Node) -> None:
        reader = self._at.only_reader(node)
        if reader is not None and reader.op == "glu" and self._lower_gate_up(node, reader):
            return
        names = node.weights[: len(node.outputs)]
        biases = node.weights[len(node.outputs) :]
        # glu reads whole groups of 32, so what follows the gate's last output must be its own (zero) padding.
        alignment = 2 * TILE if reader is not None and reader.op == "glu" else TILE
        columns: dict[str, int] = {}
        width = 0
        for name, value in zip(names, node.outputs, strict=True):
            columns[name] = width
            width += -(-value.width // alignment) * alignment
        softcap = reader if reader is not None and reader.op == "softcap" else None
        residual = reader if reader is not None and reader.op == "add" and len(node.outputs) == 1 else None
        if residual is not None and residual.inputs[0] == node.outputs[0]:  # a sum begins with it: the next one adds
            residual, role = None, "sum"
        else:
            is_last = self._graph.logits == (node if softcap is None else softcap).outputs[0]
            role = "logits" if is_last else f"linear{len(names)}"
        if residual is not None:
            buffer = self._at.place(residual.inputs[0]).buffer
        else:
            buffer = self._at.buffer(role, Value(role, width, node.outputs[0].rows))
        matrices = self._at.packed(names)
        # One record for all that read the same form of the input.
        for _, group in groupby(matrices, self._at.form_key):
            part = list(group)
            source = self._at.input_of(node.inputs[0], part)
            self._program.linear(
                [self._at.matrix(matrix) for matrix in part],
                [columns[matrix.name.split("+")[0]] for matrix in part],
                [self._at.bias(matrix, dict(zip(names, biases, strict=False))) for matrix in part],
                source.buffer,
                source.activations,
                buffer,
                residual is not None,
                node.attributes["scale"],
                0.0 if softcap is None else softcap.attributes["cap"],
            )
        if softcap is not None:
            self._at.fused.add(softcap.name)
            self._at.made(softcap.outputs[0], Place(buffer))
            return
        if residual is not None:
            self._at.fused.add(residual.name)
            self._at.made(residual.outputs[0], Place(buffer))
            return
        for name, value in zip(names, node.outputs, strict=True):
            self._at.made(value, Place(buffer, columns[name]))

    def _lower_gate_up(self, node: Node, glu: Node) -> bool:
        """One record for gate, up and their product; False when their formats or orders of inputs differ."""
        gate, up = (self._at.packed((name,))[0] for name in node.weights[:2])
        if node.attributes["scale"] != 1.0 or len(node.weights) > 2:
            return False
        if gate.format != up.format or self._at.form_key(gate) != self._at.form_key(up):
            return False
        source = self._at.input_of(node.inputs[0], [gate])
        to_buffer, to_activations = self._at.for_readers("hidden", glu.outputs[0])
        self._program.gate_up(
            glu.attributes["activation"],
            self._at.matrix(gate),
            self._at.matrix(up),
            source.buffer,
            source.activations,
            to_buffer,
            to_activations,
        )
        self._at.fused.add(glu.name)
        self._at.made(glu.outputs[0], Place(to_buffer, 0, to_activations))
        return True

    def _lower_glu(self, node: Node) -> None:
        gate, up = (self._at.place(value) for value in node.inputs)
        value = node.outputs[0]
        to_buffer, to_activations = self._at.for_readers("hidden", value)
        assert gate.column == 0, "gate is the first part of its buffer"
        self._program.glu(node.attributes["activation"], gate.buffer, up.column, value.width, to_buffer, to_activations)
        self._at.made(value, Place(to_buffer, 0, to_activations))

    def _lower_rope_write(self, node: Node) -> None:
        q, k, v = (self._at.place(value) for value in node.inputs)
        q_norm, k_norm = (self._at.vector(name) for name in node.weights) if node.weights else (NONE, NONE)
        self._program.rope_write(
            node.attributes["layer"],
            q.buffer,
            q.column,
            k.column,
            v.column,
            q_norm,
            k_norm,
            node.attributes["eps"],
            self._rope(node.attributes["rope"]),
            node.attributes["scale"],
        )
        self._at.made(node.outputs[0], q)

    def _lower_attention(self, node: Node) -> None:
        buffer = self._at.buffer("attention", node.outputs[0])
        self._program.attention(
            node.attributes["layer"],
            self._at.place(node.inputs[0]).buffer,
            buffer,
            self._attention_plan(node.attributes["window"]),
            node.attributes["softcap"] or 0.0,
            self._at.vector(node.weights[0]) if node.weights else NONE,
        )
        self._at.made(node.outputs[0], Place(buffer))

    def _lower_select_outputs(self, node: Node) -> None:
        buffer = self._at.buffer("selected", node.outputs[0])
        self._program.select(self._at.place(node.inputs[0]).buffer, buffer)
        self._at.made(node.outputs[0], Place(buffer))

    def _rope(self, rope: RopeConfig | None) -> int:
        if rope is None:
            return NONE
        if rope not in self._ropes:
            frequencies = inverse_frequencies(rope, self._model.head_dim).tolist()
            self._ropes[rope] = self._program.add_rope(frequencies, rope.attention_factor)
        return self._ropes[rope]

    def _attention_plan(self, window: int | None) -> int:
        if window not in self._plans:
            self._plans[window] = self._program.add_attention_plan(window or 0)
        return self._plans[window]
