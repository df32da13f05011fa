"""From a graph to the records of a native program: which nodes fuse, and where each value lives.

Fusions, the reason that a layer needs few barriers: a residual ``add`` becomes the accumulating form of the ``linear``
before it, or of the norm before it, together with the norm that reads the sum; norms and gated products write the int8
form that integer weights read; gate, up and their product are one record when gate and up share a format; a softcap is
the end of its ``linear``. Where weights want activations in another order, or one scale a token, norms and gated
products write floats and a quantise record follows. Values of all layers that play one role share a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from paceline._native import Program
from paceline.config import ModelConfig, RopeConfig
from paceline.errors import UnsupportedError
from paceline.executors.weights import WeightLoader, rounding_for
from paceline.ops.graph import Graph, Node, Value
from paceline.ops.reference import Rounding, inverse_frequencies
from paceline.weights.packed import TILE, PackedMatrix

NONE = -1
"""How the native side spells "no buffer"."""


@dataclass(frozen=True)
class Place:
    """Where a value is: columns of a buffer, or the int8 form of a whole table."""

    buffer: int = NONE
    column: int = 0
    activations: int = NONE


@dataclass
class Lowered:
    """A built program's map: after record ``made_by[name]`` the value of that name is at ``places[name]``."""

    places: dict[str, Place] = field(default_factory=dict)
    made_by: dict[str, int] = field(default_factory=dict)
    logits_buffer: int = NONE
    hidden_buffer: int = NONE
    features_buffer: int = NONE
    embedding: PackedMatrix | None = None


class Lowering:
    """Walks a graph once and appends records to ``program``."""

    def __init__(self, program: Program, graph: Graph, model: ModelConfig, loader: WeightLoader) -> None:
        self._program = program
        self._model = model
        self._graph = graph
        self._loader = loader
        self._buffers: dict[tuple[str, str, int], int] = {}
        self._activations: dict[tuple[str, str, int], int] = {}
        self._matrices: dict[tuple[str, ...], list[PackedMatrix]] = {}
        self._matrix_ids: dict[int, int] = {}
        self._ropes: dict[RopeConfig, int] = {}
        self._plans: dict[int | None, int] = {}
        self._readers: dict[str, list[Node]] = {}
        self._fused: set[str] = set()
        self.lowered = Lowered()
        for node in graph.nodes:
            for value in node.inputs:
                self._readers.setdefault(value.name, []).append(node)

    def run(self) -> Lowered:
        """Lowers every node; returns where the values are."""
        for node in self._graph.nodes:
            if node.name in self._fused:
                continue
            lower = getattr(self, f"_lower_{node.op}", None)
            if lower is None:
                raise UnsupportedError(f"the native executor has no record for {node.op} ({self._model.architecture})")
            lower(node)
        self.lowered.logits_buffer = self.lowered.places[self._graph.logits.name].buffer
        self.lowered.hidden_buffer = self.lowered.places[self._graph.hidden.name].buffer
        self._program.sample(self.lowered.logits_buffer)
        return self.lowered

    # ---- nodes ----

    def _lower_embed(self, node: Node) -> None:
        (matrix,) = self._packed(node.weights)
        self.lowered.embedding = matrix
        buffer = self._buffer("x", node.outputs[0])
        self._program.embed(self._matrix(matrix), buffer, node.attributes["scale"])
        self._made(node.outputs[0], Place(buffer))

    def _lower_features(self, node: Node) -> None:
        """No record: the executor fills the buffer before a step."""
        self.lowered.features_buffer = self._buffer("features", node.outputs[0])
        self._made(node.outputs[0], Place(self.lowered.features_buffer))

    def _lower_rms_norm(self, node: Node) -> None:
        value, reader = node.outputs[0], self._only_reader(node)
        if reader is not None and reader.op == "rope_write":
            self._lower_norm_of_heads(node, reader)
            return
        if reader is not None and reader.op == "add":
            self._lower_norm_add(node, reader)
            return
        to_buffer, to_activations = self._for_readers("norm", value)
        self._program.norm(
            self._place(node.inputs[0]).buffer,
            self._vector(node.weights[0]),
            node.attributes["eps"],
            value.width,
            to_buffer,
            to_activations,
        )
        self._made(value, Place(to_buffer, 0, to_activations))

    def _lower_norm_of_heads(self, node: Node, rope_write: Node) -> None:
        """Queries or keys, all heads as one row, where the product left them; no barrier between both."""
        value, place = node.outputs[0], self._place(node.inputs[0])
        after = self._graph.nodes[self._graph.nodes.index(node) + 1]
        joined = after.op == "rms_norm" and after.outputs[0] in rope_write.inputs
        weight = self._vector(node.weights[0])
        self._program.norm_in_place(place.buffer, place.column, weight, node.attributes["eps"], value.width, joined)
        self._made(value, place)

    def _lower_norm_add(self, node: Node, add: Node) -> None:
        """The norm, the sum with the residual, and what reads the sum at once: a norm, or integer weights."""
        normed, total = node.outputs[0], add.outputs[0]
        (residual,) = (self._place(value) for value in add.inputs if value != normed)
        source = self._place(node.inputs[0])
        assert source.column == residual.column == 0, "whole buffers"
        # Not onto the residual: threads that each do all rows would add twice.
        buffer = next(other for role in ("x", "y") if (other := self._buffer(role, total)) != residual.buffer)
        following = [reader for reader in self._readers[total.name] if reader.op != "add"]
        norm = following[0] if len(following) == 1 and following[0].op == "rms_norm" else None
        if norm is not None:
            to_buffer, to_activations = self._for_readers("norm", norm.outputs[0])
        else:
            floats, integers = self._forms_for(following)
            to_buffer = buffer if floats else NONE
            to_activations = self._activation("sum", total) if integers else NONE
        self._program.norm_add(
            source.buffer,
            self._vector(node.weights[0]),
            node.attributes["eps"],
            total.width,
            residual.buffer,
            buffer,
            NONE if norm is None else self._vector(norm.weights[0]),
            0.0 if norm is None else norm.attributes["eps"],
            to_buffer,
            to_activations,
        )
        self._fused.add(add.name)
        self._made(total, Place(buffer, 0, NONE if norm is not None else to_activations))
        if norm is not None:
            self._fused.add(norm.name)
            self._made(norm.outputs[0], Place(to_buffer, 0, to_activations))

    def _lower_linear(self, node: Node) -> None:
        reader = self._only_reader(node)
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
            buffer = self._place(residual.inputs[0]).buffer
        else:
            buffer = self._buffer(role, Value(role, width, node.outputs[0].rows))
        matrices = self._packed(names)
        # One record for all that read the same form of the input.
        for _, group in groupby(matrices, self._form_key):
            part = list(group)
            source = self._input_of(node.inputs[0], part)
            self._program.linear(
                [self._matrix(matrix) for matrix in part],
                [columns[matrix.name.split("+")[0]] for matrix in part],
                [self._bias(matrix, dict(zip(names, biases, strict=False))) for matrix in part],
                source.buffer,
                source.activations,
                buffer,
                residual is not None,
                node.attributes["scale"],
                0.0 if softcap is None else softcap.attributes["cap"],
            )
        if softcap is not None:
            self._fused.add(softcap.name)
            self._made(softcap.outputs[0], Place(buffer))
            return
        if residual is not None:
            self._fused.add(residual.name)
            self._made(residual.outputs[0], Place(buffer))
            return
        for name, value in zip(names, node.outputs, strict=True):
            self._made(value, Place(buffer, columns[name]))

    def _lower_gate_up(self, node: Node, glu: Node) -> bool:
        """One record for gate, up and their product; False when their formats or orders of inputs differ."""
        gate, up = (self._packed((name,))[0] for name in node.weights[:2])
        if node.attributes["scale"] != 1.0 or len(node.weights) > 2:
            return False
        if gate.format != up.format or self._form_key(gate) != self._form_key(up):
            return False
        source = self._input_of(node.inputs[0], [gate])
        to_buffer, to_activations = self._for_readers("hidden", glu.outputs[0])
        self._program.gate_up(
            glu.attributes["activation"],
            self._matrix(gate),
            self._matrix(up),
            source.buffer,
            source.activations,
            to_buffer,
            to_activations,
        )
        self._fused.add(glu.name)
        self._made(glu.outputs[0], Place(to_buffer, 0, to_activations))
        return True

    def _lower_glu(self, node: Node) -> None:
        gate, up = (self._place(value) for value in node.inputs)
        value = node.outputs[0]
        to_buffer, to_activations = self._for_readers("hidden", value)
        assert gate.column == 0, "gate is the first part of its buffer"
        self._program.glu(node.attributes["activation"], gate.buffer, up.column, value.width, to_buffer, to_activations)
        self._made(value, Place(to_buffer, 0, to_activations))

    def _lower_rope_write(self, node: Node) -> None:
        q, k, v = (self._place(value) for value in node.inputs)
        q_norm, k_norm = (self._vector(name) for name in node.weights) if node.weights else (NONE, NONE)
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
        self._made(node.outputs[0], q)

    def _lower_attention(self, node: Node) -> None:
        buffer = self._buffer("attention", node.outputs[0])
        self._program.attention(
            node.attributes["layer"],
            self._place(node.inputs[0]).buffer,
            buffer,
            self._attention_plan(node.attributes["window"]),
            node.attributes["softcap"] or 0.0,
            self._vector(node.weights[0]) if node.weights else NONE,
        )
        self._made(node.outputs[0], Place(buffer))

    def _lower_select_outputs(self, node: Node) -> None:
        buffer = self._buffer("selected", node.outputs[0])
        self._program.select(self._place(node.inputs[0]).buffer, buffer)
        self._made(node.outputs[0], Place(buffer))

    # ---- places ----

    def _made(self, value: Value, place: Place) -> None:
        self.lowered.places[value.name] = place
        self.lowered.made_by[value.name] = self._program.num_records - 1

    def _place(self, value: Value) -> Place:
        return self.lowered.places[value.name]

    def _only_reader(self, node: Node) -> Node | None:
        readers = {id(reader): reader for value in node.outputs for reader in self._readers.get(value.name, [])}
        return next(iter(readers.values())) if len(readers) == 1 else None

    def _for_readers(self, role: str, value: Value) -> tuple[int, int]:
        """Buffer and plain int8 form for a value, each only where some reader's weights need it; other int8 forms are
        made of the buffer.
        """
        readers = self._readers[value.name]
        assert all(reader.op == "linear" for reader in readers), f"{value.name} is read by another op than linear"
        floats, integers = self._forms_for(readers)
        return (
            self._buffer(role, value) if floats else NONE,
            self._activation(role, value) if integers else NONE,
        )

    def _forms_for(self, readers: Sequence[Node]) -> tuple[bool, bool]:
        """Whether some of them read floats, and whether some read the plain int8 form."""
        floats = integers = False
        for reader in readers:
            if reader.op != "linear":
                floats = True
                continue
            for matrix in self._matrices_of(reader):
                rounding = rounding_for(matrix)
                if rounding is not None and rounding.is_plain:
                    integers = True
                else:
                    floats = True
        return floats, integers

    @staticmethod
    def _form_key(matrix: PackedMatrix) -> tuple[bool, bytes]:
        """Equal for matrices that one record may read; floats are beside the plain int8 form."""
        return (rounding_for(matrix) or Rounding()).key

    def _input_of(self, value: Value, matrices: list[PackedMatrix]) -> Place:
        """The value with the int8 form that the matrices, alike by ``_form_key``, read (if they are not all floats); a
        record makes it where the maker of the value did not.
        """
        place = self._place(value)
        rounding = next((form for form in map(rounding_for, matrices) if form is not None), None)
        if rounding is None or (rounding.is_plain and place.activations != NONE):
            return place
        assert place.buffer != NONE, f"{value.name} is there in another form only"
        activations = self._activation("quantised", value)
        order = [] if rounding.order is None else rounding.order.tolist()
        self._program.quantise(place.buffer, value.width, activations, rounding.per_token, order)
        return Place(place.buffer, place.column, activations)

    def _buffer(self, role: str, value: Value) -> int:
        key = (role, value.rows, value.width)
        if key not in self._buffers:
            self._buffers[key] = self._program.add_buffer(value.width, value.rows == "outputs")
        return self._buffers[key]

    def _activation(self, role: str, value: Value) -> int:
        key = (role, value.rows, value.width)
        if key not in self._activations:
            self._activations[key] = self._program.add_activations(value.width, value.rows == "outputs")
        return self._activations[key]

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

    # ---- weights ----

    def _matrices_of(self, node: Node) -> list[PackedMatrix]:
        """The packed weights of a linear node, grouped as its lowering will ask for them."""
        names = node.weights[: len(node.outputs)]
        reader = self._only_reader(node)
        if reader is not None and reader.op == "glu":
            return [self._packed((name,))[0] for name in names]
        return self._packed(names)

    def _packed(self, names: tuple[str, ...]) -> list[PackedMatrix]:
        if names not in self._matrices:
            singles = [self._matrices.get((name,)) for name in names]
            if len(names) > 1 and all(singles):
                self._matrices[names] = [matrix for single in singles for matrix in single or []]
            else:
                self._matrices[names] = self._loader.matrices(names)
        return self._matrices[names]

    def _matrix(self, matrix: PackedMatrix) -> int:
        if id(matrix) not in self._matrix_ids:
            fmt = matrix.format
            self._matrix_ids[id(matrix)] = self._program.add_matrix(
                matrix.data,
                fmt.kind,
                fmt.group,
                fmt.offset,
                matrix.num_outputs,
                matrix.num_inputs,
                fmt.tile_bytes(matrix.num_inputs),
                fmt.num_groups(matrix.num_inputs),
                matrix.order,
            )
        return self._matrix_ids[id(matrix)]

    def _vector(self, name: str) -> int:
        return self._program.add_vector(self._loader.vector(name))

    def _bias(self, matrix: PackedMatrix, biases: dict[str, str]) -> int:
        """The bias of a (possibly merged) matrix: merged parts are multiples of a tile, so their biases follow each
        other.
        """
        if not biases:
            return NONE
        return self._program.add_vector(
            np.concatenate([self._loader.vector(biases[name]) for name in matrix.name.split("+")])
        )
