"""Runs a graph node by node."""

from __future__ import annotations

from torch import Tensor

from paceline.executors.torch.operations import OPERATIONS, Pass
from paceline.ops.graph import Graph


class Walk:
    """The nodes of a graph with what each does, and when a value is needed no more."""

    def __init__(self, graph: Graph, keep: tuple[str, ...]) -> None:
        """``keep`` names the values that are wanted."""
        last_use: dict[str, int] = {}
        for at, node in enumerate(graph.nodes):
            for value in (*node.inputs, *node.outputs):
                last_use[value.name] = at
        self._keep = keep
        self._nodes = [
            (
                OPERATIONS[node.op],
                node,
                [value.name for value in node.inputs],
                [value.name for value in node.outputs],
                [name for name, end in last_use.items() if end == at and name not in keep],
            )
            for at, node in enumerate(graph.nodes)
        ]

    def run(self, step: Pass) -> dict[str, Tensor]:
        """The values that are kept."""
        values: dict[str, Tensor] = {}
        for apply, node, inputs, outputs, dead in self._nodes:
            made = apply(node, [values[name] for name in inputs], step)
            values.update(zip(outputs, made, strict=True))
            for name in dead:
                del values[name]
        return values
