"""The op table: every op that a model may use, with its cost and its definition.

Model builders, executors and the tests read this table; the function named by ``reference`` is what the op means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.ops import reference
from paceline.ops.graph import Node
from paceline.ops.reference import Step, Table


@dataclass(frozen=True)
class OpSpec:
    """An op.

    ``flops(node, context)`` is the number of operations for one row that sees ``context`` keys;
    ``reference(node, inputs, step)`` makes the outputs from the inputs, in plain numpy.
    """

    name: str
    summary: str
    flops: Callable[[Node, int], int]
    reference: Callable[[Node, list[Table], Step], list[Table]]


def _per_element(count: int) -> Callable[[Node, int], int]:
    return lambda node, context: count * node.outputs[0].width


def _linear_flops(node: Node, context: int) -> int:
    return sum(2 * node.inputs[0].width * value.width for value in node.outputs)


def _experts_glu_flops(node: Node, context: int) -> int:
    return 4 * node.inputs[0].width * node.outputs[0].width


def _experts_down_flops(node: Node, context: int) -> int:
    return 2 * node.inputs[0].width * node.outputs[0].width


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec("embed", "row of a matrix for each token", lambda node, context: 0, reference.embed),
        OpSpec("features", "rows that the plan brings", lambda node, context: 0, reference.features),
        OpSpec("rms_norm", "x / sqrt(mean(x^2) + eps) * weight", _per_element(4), reference.rms_norm),
        OpSpec("linear", "(x W^T + b) * scale", _linear_flops, reference.linear),
        OpSpec("rope_write", "norm and rotate heads, store keys and values", _per_element(6), reference.rope_write),
        OpSpec(
            "attention",
            "softmax(q K^T) V",
            lambda node, context: 4 * context * node.outputs[0].width,
            reference.attention,
        ),
        OpSpec("glu", "act(gate) * up", _per_element(8), reference.glu),
        OpSpec("softcap", "cap * tanh(x / cap)", _per_element(8), reference.softcap),
        OpSpec("route", "experts of each row and their weights", _per_element(8), reference.route),
        OpSpec("experts_glu", "act(gate x) * up x of the chosen experts", _experts_glu_flops, reference.experts_glu),
        OpSpec(
            "experts_down", "weighted sum of W h over the chosen experts", _experts_down_flops, reference.experts_down
        ),
        OpSpec("add", "x + y", _per_element(1), reference.add),
        OpSpec("select_outputs", "rows whose logits are wanted", lambda node, context: 0, reference.select_outputs),
    )
}
