"""A model as a list of nodes over named values: what builders write and executors read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Rows = Literal["step", "outputs"]


@dataclass(frozen=True)
class Value:
    """A table of floats [rows, width]; ``rows`` is "step" for every token of a step, "outputs" for those whose logits
    are wanted.
    """

    name: str
    width: int
    rows: Rows = "step"


@dataclass(frozen=True)
class Node:
    """One application of an op: values in, values out, the names of its weights, and its constants."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the first value that the node makes."""
        return self.outputs[0].name


@dataclass(frozen=True)
class WeightSpec:
    """A weight that the graph reads: (outputs, inputs) for a matrix, (length,) for a vector, (experts, outputs, inputs)
    for the same matrix of all experts and (experts, outputs) for their vectors.

    ``rope_heads`` is the number of heads whose rows rotate in pairs (0: none), so that loaders can bring pairs
    together. A "router" stays as the file holds it: a few numbers decide there which experts a token meets.
    """

    name: str
    shape: tuple[int, ...]
    rope_heads: int = 0
    role: Literal["layer", "embedding", "head", "router", "experts"] = "layer"


@dataclass(frozen=True)
class Graph:
    """Nodes in the order they run, the weights they read, and the value that holds the logits."""

    nodes: tuple[Node, ...]
    weights: dict[str, WeightSpec]
    logits: Value

    @property
    def hidden(self) -> Value:
        """The residual stream after the last layer: what ``select_outputs`` reads."""
        (select,) = (node for node in self.nodes if node.op == "select_outputs")
        return select.inputs[0]
