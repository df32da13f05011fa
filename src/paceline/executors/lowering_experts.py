"""The records of a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from paceline._native import Program
from paceline.errors import UnsupportedError
from paceline.executors.placement import NONE, Place, Placement
from paceline.executors.weights import rounding_for
from paceline.ops.graph import Graph, Node, Value

MAX_CHOSEN = 32
"""Experts that a row may choose: kMaxChosen of csrc/kernels/table.h."""


class ExpertLowering:
    """Appends the records of routing and experts to ``program``; layers of one shape share their slots."""

    def __init__(self, program: Program, graph: Graph, placement: Placement) -> None:
        self._program = program
        self._graph = graph
        self._at = placement
        self._slot_lists: dict[tuple[int, int], int] = {}

    def lower_route(self, node: Node) -> None:
        logits, value = self._at.place(node.inputs[0]), node.outputs[0]
        assert logits.column == 0, "logits are the first part of their buffer"
        buffer = self._at.buffer("routing", value)
        slots = self._slots(node.inputs[0].width, node.attributes["num_chosen"])
        self._program.route(logits.buffer, slots, node.attributes["normalise"], buffer)
        self._at.made(value, Place(buffer))

    def lower_experts_glu(self, node: Node) -> None:
        (x, routing), value = node.inputs, node.outputs[0]
        gate, up = self._at.matrices_of(node)
        if rounding_for(gate) and rounding_for(up) and self._at.form_key(gate) != self._at.form_key(up):
            raise UnsupportedError(f"{gate.name} and {up.name} want different int8 forms of their input")
        source = self._at.input_of(x, [gate, up])
        num_chosen = node.attributes["num_chosen"]
        slot = Value(value.name, value.width // num_chosen, value.rows)
        floats, integers = self._at.forms_for(self._at.readers[value.name])
        buffer = self._at.buffer("slots", slot, per_row=num_chosen) if floats else NONE
        activations = self._at.activation("slots", slot, per_row=num_chosen) if integers else NONE
        gate_bias, up_bias = [self._at.vector(name) for name in node.weights[2:]] or [NONE, NONE]
        self._program.experts_glu(
            self._at.matrix(gate),
            self._at.matrix(up),
            gate_bias,
            up_bias,
            self._slots(self._num_experts(node), num_chosen),
            node.attributes["activation"],
            source.buffer if not (rounding_for(gate) and rounding_for(up)) else NONE,
            source.activations,
            buffer,
            activations,
        )
        self._at.made(value, Place(buffer, 0, activations, self._at.place(routing).buffer, num_chosen))

    def lower_experts_down(self, node: Node) -> None:
        """A residual ``add`` after it becomes its accumulating form, as for a linear."""
        (h, routing), value = node.inputs, node.outputs[0]
        (down,) = self._at.matrices_of(node)
        num_chosen = node.attributes["num_chosen"]
        place, form = self._at.place(h), rounding_for(down)
        if form is not None and not form.is_plain:
            slot = Value(h.name, h.width // num_chosen, h.rows)
            place = replace(place, activations=self._at.activation("quantised", slot, per_row=num_chosen))
            order = [] if form.order is None else form.order.tolist()
            self._program.quantise(place.buffer, slot.width, place.activations, form.per_token, order)
        add = self._at.residual_of(node)
        buffer = self._at.buffer("sum", value) if add is None else self._at.place(add.inputs[0]).buffer
        self._program.experts_down(
            self._at.matrix(down),
            self._at.vector(node.weights[1]) if len(node.weights) > 1 else NONE,
            self._slots(self._num_experts(node), num_chosen),
            self._at.place(routing).buffer,
            place.buffer,
            place.activations,
            buffer,
            add is not None,
        )
        if add is not None:
            self._at.fused.add(add.name)
        self._at.made(value if add is None else add.outputs[0], Place(buffer))

    def _num_experts(self, node: Node) -> int:
        return self._graph.weights[node.weights[0]].shape[0]

    def _slots(self, num_experts: int, num_chosen: int) -> int:
        key = (num_experts, num_chosen)
        if num_chosen > MAX_CHOSEN:
            raise UnsupportedError(
                f"{num_chosen} experts for each token; the native executor takes at most {MAX_CHOSEN}"
            )
        if key not in self._slot_lists:
            self._slot_lists[key] = self._program.add_slots(*key)
        return self._slot_lists[key]
