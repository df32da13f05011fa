"""What a method needs to know of a stage's inputs: second moments over the calibration tokens, and what is to be met.

Notation: X [T, K] inputs of a stage's matrices as the quantised model has them, Y [T, N] outputs as the original has
them, r [T, N] by how much the residual stream of the quantised model already lags behind the original, w [T] weights of
the tokens. H = X^T w X, YX = (Y + r)^T w X. Where the products are scaled (Granite's), Y and r are divided by that.

Where the product is added to the residual stream, w is 1 / mean square of the stream after it: the norm that reads the
stream divides by it, so an error counts relative to it. (Without that the first token of each sequence, a thousand
times as large as others in SmolLM2, is most of H.) Where a norm reads the product itself, w is 1 / mean square of that.
Checked by: tests/unit/test_quantize_moments.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.ops.graph import Node
from paceline.quantize.forward import SequenceForward, Stage, Values, chunks
from paceline.quantize.grid import Doubles, Table

SMALLEST_POWER = 1e-6
"""Norms add about as much: a stream that is 0 (a token whose embedding is) would have an infinite weight."""


@dataclass(frozen=True)
class Moments:
    """H [K, K], and YX [N, K] of each matrix, in the graph's order of rows; none where the products to be met are the
    weights' own."""

    H: Doubles
    YX: dict[str, Doubles]


def input_moments(stage: Stage, values: Values, tokens: NDArray[np.int32]) -> Moments:
    """Every token counts the same, and what is to be met are the stage's own products."""
    x = values[stage.input]
    H = np.zeros((x.shape[-1],) * 2)
    for part in chunks(tokens.shape):
        flat = x[part].reshape(-1, x.shape[-1])
        # A copy, because numpy would see that both are one matrix and take a routine of half the speed a product.
        H += flat.T @ flat.copy()
    return Moments(H, {})


class AsymmetricMoments:
    """Adds the moments up while the original runs through a stage: an ``Observer``.

    Inputs are as the quantised model has them, products as the original has them, and its biases taken off.
    """

    def __init__(
        self,
        forward: SequenceForward,
        stage: Stage,
        quantised: Values,
        *,
        follow_residual: bool = True,
        weigh_tokens: bool = True,
    ) -> None:
        """``forward`` is the original's."""
        assert stage.linear is not None
        self._stage = stage
        self._quantised = quantised
        self._residual = residual_of(stage)
        self._follow = follow_residual and self._residual is not None
        self._weigh = weigh_tokens and self._residual is not None
        self._biases = [forward.weights.values(name) for name in stage.linear.weights[len(stage.matrices) :]]
        self._is_normed = weigh_tokens and any(
            node.op == "rms_norm" and node.inputs[0] in stage.linear.outputs for node in stage.nodes
        )
        self._scale = np.float32(stage.linear.attributes["scale"])
        width = quantised[stage.input].shape[-1]
        YX = {value.name: np.zeros((value.width, width)) for value in stage.linear.outputs}
        self.moments = Moments(np.zeros((width, width)), YX)

    def __call__(self, part: slice, original: Values) -> None:
        x = self._quantised[self._stage.input][part]
        x = x.reshape(-1, x.shape[-1])
        names = self._stage.matrices
        products = [original[name].reshape(len(x), -1) / self._scale for name in names]
        if self._biases:
            products = [product - bias for product, bias in zip(products, self._biases, strict=True)]
        weighted = x.copy()
        if self._residual is not None:
            stream = original[self._residual].reshape(len(x), -1)
            if self._weigh:
                weighted /= power(stream + products[0] * self._scale)[:, None]
            if self._follow:
                lag = stream - self._quantised[self._residual][part].reshape(len(x), -1)
                products[0] = products[0] + lag / self._scale
        elif self._is_normed:
            weighted /= power(products[0])[:, None]
        np.add(self.moments.H, weighted.T @ x, out=self.moments.H)
        for name, y in zip(names, products, strict=True):
            self.moments.YX[name] += y.T @ weighted


def power(stream: Table) -> Table:
    """The mean square of each row of a residual stream [T, width], ``SMALLEST_POWER`` at least."""
    return np.asarray(np.maximum(np.mean(stream * stream, axis=1), np.float32(SMALLEST_POWER)), np.float32)


def residual_of(stage: Stage) -> str | None:
    """The value that the stage's single product is added to, if it is."""
    if stage.linear is None or len(stage.linear.outputs) != 1:
        return None
    product = stage.linear.outputs[0].name
    adds: list[Node] = [node for node in stage.nodes if node.op == "add" and node.inputs[1].name == product]
    return adds[0].inputs[0].name if adds else None
