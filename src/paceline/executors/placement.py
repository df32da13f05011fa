"""Where a native program has the values and weights of a graph: what lowering a node asks and adds to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline._native import Program
from paceline.executors.weights import WeightLoader, rounding_for
from paceline.ops.graph import Graph, Node, Value
from paceline.ops.reference import Rounding
from paceline.weights.packed import PackedMatrix

NONE = -1
"""How the native side spells "no buffer"."""

MULTIPLYING = ("linear", "experts_glu", "experts_down")
"""Ops whose first input is multiplied with matrices: they may read it as int8."""


@dataclass(frozen=True)
class Place:
    """Where a value is: columns of a buffer, or the int8 form of a whole table.

    With ``num_chosen`` rows are slots, in the order that the routing in buffer ``routing`` gives: a row of the value is
    the slots of its choices, side by side.
    """

    buffer: int = NONE
    column: int = 0
    activations: int = NONE
    routing: int = NONE
    num_chosen: int = 0


@dataclass
class Lowered:
    """A built program's map: after record ``made_by[name]`` the value of that name is at ``places[name]``."""

    places: dict[str, Place] = field(default_factory=dict)
    made_by: dict[str, int] = field(default_factory=dict)
    logits_buffer: int = NONE
    hidden_buffer: int = NONE
    features_buffer: int = NONE
    embedding: PackedMatrix | None = None


class Placement:
    """The buffers, int8 forms and weights of a program. Values of all layers that play one role share a buffer."""

    def __init__(self, program: Program, graph: Graph, loader: WeightLoader) -> None:
        self._program = program
        self._loader = loader
        self._buffers: dict[tuple[str, str, int, int], int] = {}
        self._activations: dict[tuple[str, str, int, int], int] = {}
        self._matrices: dict[tuple[str, ...], list[PackedMatrix]] = {}
        self._matrix_ids: dict[int, int] = {}
        self.readers: dict[str, list[Node]] = {}
        self.fused: set[str] = set()
        self.lowered = Lowered()
        for node in graph.nodes:
            for value in node.inputs:
                self.readers.setdefault(value.name, []).append(node)

    def made(self, value: Value, place: Place) -> None:
        self.lowered.places[value.name] = place
        self.lowered.made_by[value.name] = self._program.num_records - 1

    def place(self, value: Value) -> Place:
        return self.lowered.places[value.name]

    def only_reader(self, node: Node) -> Node | None:
        readers = {id(reader): reader for value in node.outputs for reader in self.readers.get(value.name, [])}
        return next(iter(readers.values())) if len(readers) == 1 else None

    def residual_of(self, node: Node) -> Node | None:
        """The ``add`` that adds what the node makes to a residual stream."""
        reader = self.only_reader(node)
        is_residual = reader is not None and reader.op == "add" and reader.inputs[0] != node.outputs[0]
        return reader if is_residual else None

    def for_readers(self, role: str, value: Value) -> tuple[int, int]:
        """Buffer and plain int8 form for a value, each only where some reader's weights need it; other int8 forms are
        made of the buffer.
        """
        readers = self.readers[value.name]
        assert all(reader.op in MULTIPLYING for reader in readers), f"{value.name} is read by another op than products"
        floats, integers = self.forms_for(readers)
        return (
            self.buffer(role, value) if floats else NONE,
            self.activation(role, value) if integers else NONE,
        )

    def forms_for(self, readers: Sequence[Node]) -> tuple[bool, bool]:
        """Whether some of them read floats, and whether some read the plain int8 form."""
        floats = integers = False
        for reader in readers:
            if reader.op not in MULTIPLYING:
                floats = True
                continue
            for matrix in self.matrices_of(reader):
                rounding = rounding_for(matrix)
                if rounding is not None and rounding.is_plain:
                    integers = True
                else:
                    floats = True
        return floats, integers

    @staticmethod
    def form_key(matrix: PackedMatrix) -> tuple[bool, bytes]:
        """Equal for matrices that one record may read; floats are beside the plain int8 form."""
        return (rounding_for(matrix) or Rounding()).key

    def input_of(self, value: Value, matrices: list[PackedMatrix]) -> Place:
        """The value with the int8 form that the matrices, alike by ``_form_key``, read (if they are not all floats); a
        record makes it where the maker of the value did not.
        """
        place = self.place(value)
        rounding = next((form for form in map(rounding_for, matrices) if form is not None), None)
        if rounding is None or (rounding.is_plain and place.activations != NONE):
            return place
        assert place.buffer != NONE, f"{value.name} is there in another form only"
        activations = self.activation("quantised", value)
        order = [] if rounding.order is None else rounding.order.tolist()
        self._program.quantise(place.buffer, value.width, activations, rounding.per_token, order)
        return Place(place.buffer, place.column, activations)

    def buffer(self, role: str, value: Value, *, per_row: int = 1) -> int:
        key = (role, value.rows, value.width, per_row)
        if key not in self._buffers:
            self._buffers[key] = self._program.add_buffer(value.width, value.rows == "outputs", per_row)
        return self._buffers[key]

    def activation(self, role: str, value: Value, *, per_row: int = 1) -> int:
        key = (role, value.rows, value.width, per_row)
        if key not in self._activations:
            self._activations[key] = self._program.add_activations(value.width, value.rows == "outputs", per_row)
        return self._activations[key]

    # ---- weights ----

    def matrices_of(self, node: Node) -> list[PackedMatrix]:
        """The packed weights of a node that multiplies, grouped as its lowering will ask for them."""
        if node.op != "linear":
            count = len(node.weights) - node.attributes["num_biases"]
            return [self.packed((name,))[0] for name in node.weights[:count]]
        names = node.weights[: len(node.outputs)]
        reader = self.only_reader(node)
        if reader is not None and reader.op == "glu":
            return [self.packed((name,))[0] for name in names]
        return self.packed(names)

    def packed(self, names: tuple[str, ...]) -> list[PackedMatrix]:
        if names not in self._matrices:
            singles = [self._matrices.get((name,)) for name in names]
            if len(names) > 1 and all(singles):
                self._matrices[names] = [matrix for single in singles for matrix in single or []]
            else:
                self._matrices[names] = self._loader.matrices(names)
        return self._matrices[names]

    def matrix(self, matrix: PackedMatrix) -> int:
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

    def vector(self, name: str) -> int:
        return self._program.add_vector(self._loader.vector(name))

    def bias(self, matrix: PackedMatrix, biases: dict[str, str]) -> int:
        """The bias of a (possibly merged) matrix: merged parts are multiples of a tile, so their biases follow each
        other.
        """
        if not biases:
            return NONE
        return self._program.add_vector(
            np.concatenate([self._loader.vector(biases[name]) for name in matrix.name.split("+")])
        )
