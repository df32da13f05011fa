"""Largest errors of float32 arithmetic in gated products and in the nodes of a mixture of experts, given exact inputs;
``compare.py`` has those of the other nodes.

A row's experts must be those of the reference: it is given the same logits, and comparing them rounds nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config import Activation
from paceline.ops.graph import Node
from paceline.ops.reference import Step, Table, expert_products, input_of

EPSILON = float(np.finfo(np.float32).eps)

Ids = NDArray[np.int64]


def slots_as_rows(table: Table, experts: Ids) -> Table:
    """Slots [rows * chosen, width], sorted by expert and then by row, as rows [rows, chosen * width] in the order of
    the rows' choices ``experts`` [rows, chosen].
    """
    rows = np.empty_like(table)
    rows[np.argsort(experts.reshape(-1), kind="stable")] = table
    return rows.reshape(len(experts), -1)


def gated_bound(activation: Activation, gate: Table, up: Table, gate_bound: Table, up_bound: Table, y: Table) -> Table:
    """Of y = act(gate) * up: errors of the inputs times the slopes, at most 1.13 of each activation, and of the up's
    factor 1. Then a few eps of the value; where the sigmoid is near 0 it is an exponential of z, and z is rounded,
    which adds |z| eps.
    """
    inputs_slack = 1.13 * (np.abs(up) + 1) * gate_bound + np.abs(gate) * up_bound
    z = {
        "silu": np.zeros_like(gate),  # the gate itself, exact
        "gelu_tanh": 1.6 * gate + 0.0714 * gate**3,
        "swiglu_oai": 1.702 * gate,
    }[activation]
    relative = EPSILON * (16 + 4 * np.minimum(np.abs(z), 90))
    return np.asarray(inputs_slack + relative * np.abs(y) + 1e-30, np.float32)


def route_bound(node: Node, logits: Table, routing: Table) -> Table:
    """Ids: none. Weights: the distance to the largest logit, which is the exponent, is rounded; then an exponential (2
    ulp), a sum of at most so many terms as there are experts, 16 at a time, and a quotient.
    """
    count = node.attributes["num_chosen"]
    chosen = np.take_along_axis(logits, routing[:, :count].astype(np.int64), axis=1)
    relative = EPSILON * (logits.max(axis=1, keepdims=True) - chosen + logits.shape[1] / 16 + 8)
    weights = routing[:, count:] * relative + 1e-37
    return np.concatenate([np.zeros_like(weights), weights], axis=1).astype(np.float32)


def experts_glu_bound(node: Node, x: Table, routing: Table, y: Table, step: Step) -> Table:
    """Of each choice the products' bounds, carried through the activation."""
    count = node.attributes["num_chosen"]
    biases = node.weights[2:] or (None, None)
    bounds = []
    for experts, part in zip(routing[:, :count].T.astype(np.int64), np.split(y, count, axis=1), strict=True):
        gate, gate_bound = _products(node.weights[0], biases[0], x, experts, step)
        up, up_bound = _products(node.weights[1], biases[1], x, experts, step)
        bounds.append(gated_bound(node.attributes["activation"], gate, up, gate_bound, up_bound, part))
    return np.concatenate(bounds, axis=1)


def experts_down_bound(node: Node, h: Table, routing: Table, step: Step) -> Table:
    """The weighted sum of the products' bounds, and of the sum's own roundings: one for each choice, of terms that are
    at most the sum of magnitudes.
    """
    count = node.attributes["num_chosen"]
    bias = node.weights[1] if node.attributes["num_biases"] else None
    bound = np.zeros((len(h), node.outputs[0].width))
    for slot, part in enumerate(np.split(h, count, axis=1)):
        y, of_product = _products(node.weights[0], bias, part, routing[:, slot].astype(np.int64), step)
        bound += np.abs(routing[:, count + slot, None]) * (of_product + (count + 1) * EPSILON * np.abs(y))
    return np.asarray(bound + 1e-30, np.float32)


def _products(name: str, bias: str | None, x: Table, experts: Ids, step: Step) -> tuple[Table, Table]:
    """W_e x + b_e of each row's expert, and its bound: that of a sum of n products (``compare.py``)."""
    y = expert_products(name, bias, x, experts, step)
    magnitudes, terms = np.abs(input_of(name, x, step)), step.weights.magnitudes(name)
    sums = np.empty_like(y)
    for expert in np.unique(experts):
        rows = experts == expert
        sums[rows] = magnitudes[rows] @ terms[expert].T
    return y, np.asarray((x.shape[1] + 3) * EPSILON * sums + 2 * EPSILON * np.abs(y), np.float32)
