"""Which weights can absorb a scale of a matrix's inputs, so that the model stays the same function.

Notation: W [N, K] a matrix, x [K] its input, s [K] > 0. W x = (W diag(s)) (x / s), and x / s costs nothing where
whoever makes x is linear in a weight of its own: a norm in its vector, the product of a gated network in the rows of
``up``, attention in the rows of ``v``. Grouped heads share values, so there all query heads of a group share scales.

Source: Xiao et al. 2211.10438, section 4; Lin et al. 2306.00978, section 3.2.
Departures: v is folded with grouped heads as well, where both papers' code leaves the output projection as it is.
Checked by: tests/unit/test_quantize_folding.py: with powers of two the folded model has the same bits, with any scales
the same values to f64 rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig
from paceline.ops.graph import Graph, Node, Value
from paceline.weights.quantized_matrix import QuantizedMatrix

Table = NDArray[np.float32]


@dataclass(frozen=True)
class Producer:
    """Who makes the inputs of a matrix: the vector or matrix ``weight`` and, if it has one, its ``bias``.

    Row (head, d) of it makes ``repeats`` inputs (head, 0 .. repeats - 1, d) with d < ``width``; elsewhere row k makes
    input k.
    """

    weight: str
    bias: str | None = None
    repeats: int = 1
    width: int = 1

    def pool(self, inputs: Table, reduce: Callable[..., Table]) -> Table:
        """One number a row from one an input [K]: ``reduce`` (np.mean, np.max) over those that the row makes."""
        return np.asarray(reduce(inputs.reshape(-1, self.repeats, self.width), axis=1).reshape(-1))

    def spread(self, rows: Table) -> Table:
        """One number an input [K] from one a row."""
        shared = rows.reshape(-1, 1, self.width)
        return np.repeat(shared, self.repeats, axis=1).reshape(-1)

    @property
    def tensors(self) -> tuple[str, ...]:
        """What has to be divided by the scale."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def producer_of(graph: Graph, linear: Node, model: ModelConfig) -> Producer | None:
    """Whose weights can absorb a scale of the inputs of ``linear``; None when somebody else reads these inputs too."""
    (x,) = linear.inputs
    if sum(value == x for node in graph.nodes for value in node.inputs) != 1:
        return None
    maker = _maker(graph, x)
    if maker is None:
        return None
    if maker.op == "rms_norm":
        return Producer(maker.weights[0])
    if maker.op == "glu":
        is_linear_in_up = maker.attributes["activation"] != "swiglu_oai"
        return _rows(graph, maker.inputs[1]) if is_linear_in_up else None
    if maker.op == "attention":
        (write,) = (
            node
            for node in graph.nodes
            if node.op == "rope_write" and node.attributes["layer"] == maker.attributes["layer"]
        )
        rows = _rows(graph, write.inputs[2])
        return rows and replace(rows, repeats=model.num_heads // model.num_kv_heads, width=model.head_dim)
    return None


def _maker(graph: Graph, value: Value) -> Node | None:
    return next((node for node in graph.nodes if value in node.outputs), None)


def _rows(graph: Graph, value: Value) -> Producer | None:
    """The matrix whose product is ``value``, unless something else is made of that product too."""
    maker = _maker(graph, value)
    readers = sum(value in node.inputs for node in graph.nodes)
    if maker is None or maker.op != "linear" or readers != 1:
        return None
    index = maker.outputs.index(value)
    num_outputs = len(maker.outputs)
    bias = maker.weights[num_outputs + index] if maker.attributes["num_biases"] else None
    return Producer(maker.weights[index], bias)


def divide_rows(values: Table, scale: Table) -> Table:
    """A vector, or the rows of a matrix, divided by ``scale`` [rows]."""
    return np.asarray(values / (scale if values.ndim == 1 else scale[:, None]), values.dtype)


def can_divide_rows(matrix: QuantizedMatrix, scale: Table) -> bool:
    """Whether no group's scale that counts leaves its type's range, or loses more than 2^-8 of itself, below it."""
    divided = matrix.scale.astype(np.float32) / scale[:, None]
    with np.errstate(over="ignore"):
        lost = np.abs(_stored(divided, matrix) - divided)
    counts = matrix.scale > np.finfo(matrix.scale.dtype).tiny
    return bool((lost <= np.where(counts, divided * np.float32(2.0**-8), np.inf)).all())


def divide_quantized_rows(matrix: QuantizedMatrix, scale: Table) -> QuantizedMatrix:
    """The matrix with rows divided by ``scale`` [rows], if ``can_divide_rows``: codes stay, their scales are divided.

    Exact where the quotients are numbers of the scales' type, as with powers of two; else each weight moves by 2^-11 of
    itself with f16 scales, 2^-8 at most.
    """
    assert can_divide_rows(matrix, scale)
    return replace(matrix, scale=_stored(matrix.scale.astype(np.float32) / scale[:, None], matrix))


def _stored(scale: Table, matrix: QuantizedMatrix) -> NDArray[np.float16] | Table:
    return scale.astype(np.float16) if matrix.scale.dtype == np.float16 else scale
