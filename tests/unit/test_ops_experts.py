"""The ops of a mixture of experts against loops that follow their definitions word by word."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config

from paceline.config import Activation
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Node, Value
from paceline.ops.reference import (
    KeyValues,
    Rounding,
    Step,
    Table,
    activated,
    experts_down,
    experts_glu,
    rounded_activations,
    route,
)

ROWS, HIDDEN, EXPERTS, WIDTH = 5, 40, 6, 7
SUM_ERROR = 40 * 2.0**-24
"""Of a sum of 40 products in f32, relative to their magnitudes (Higham 2002, 3.1), which are of the sum's own size."""


class Arrays:
    """Weights by name; activations are rounded in plain groups where ``rounds`` says so."""

    def __init__(self, arrays: dict[str, Table], *, rounds: bool) -> None:
        self.arrays, self.rounds = arrays, rounds

    def values(self, name: str) -> Table:
        return self.arrays[name]

    def magnitudes(self, name: str) -> Table:
        return np.abs(self.arrays[name])

    def rounding(self, name: str) -> Rounding | None:
        return Rounding() if self.rounds else None


def step_of(weights: Arrays) -> Step:
    nothing = np.zeros(0, np.int32)
    pages = np.zeros((1, 1, 1, 1, 1), np.float32)
    kv = KeyValues(pages, pages, "f32")
    return Step(tiny_config(), weights, kv, nothing, nothing, nothing, nothing.reshape(0, 0), nothing)


def act(gate: float, up: float, activation: Activation) -> float:
    """Of one number."""
    if activation == "silu":
        return gate / (1 + math.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)


@given(
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=5, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_routing_takes_the_largest_logits_of_equals_the_lower_expert(
    count: int, normalise: bool, rows: list[list[float]]
) -> None:
    node = Node("route", (), (Value("routing", 2 * count),), (), {"num_chosen": count, "normalise": normalise})
    (found,) = route(node, [np.array(rows, np.float32)], step_of(Arrays({}, rounds=False)))
    assert found.dtype == np.float32
    for logits, routing in zip(rows, found, strict=True):
        order: list[int] = []
        for _ in range(count):
            left = [expert for expert in range(5) if expert not in order]
            best = left[0]
            for expert in left:
                if logits[expert] > logits[best]:
                    best = expert
            order.append(best)
        assert routing[:count].tolist() == order
        total = sum(math.exp(logits[expert]) for expert in (order if normalise else range(5)))
        for expert, weight in zip(order, routing[count:], strict=True):
            assert weight == pytest.approx(math.exp(logits[expert]) / total, rel=1e-6)


def test_routing_of_huge_logits_is_finite() -> None:
    node = Node("route", (), (Value("routing", 4),), (), {"num_chosen": 2, "normalise": False})
    (found,) = route(node, [np.array([[-1e30, 3e38, 0.0]], np.float32)], step_of(Arrays({}, rounds=False)))
    assert found.tolist() == [[1.0, 2.0, 1.0, 0.0]]


def experts_graph(*, biases: bool, activation: Activation, count: int) -> Graph:
    g = GraphBuilder()
    x = g.embed("x", vocab_size=ROWS, width=HIDDEN)
    (logits,) = g.linear(x, [("router", EXPERTS)], role="router")
    routing = g.route(logits, num_chosen=count, normalise=True)
    h = g.experts_glu(
        x,
        routing,
        ("gate", "up"),
        num_experts=EXPERTS,
        width=WIDTH,
        activation=activation,
        biases=("gate_bias", "up_bias") if biases else None,
    )
    return g.finish(
        g.experts_down(h, routing, "down", num_experts=EXPERTS, outputs=HIDDEN, bias="down_bias" if biases else None)
    )


def product(matrix: Any, x: Any, bias: Any) -> list[float]:
    """W x + b, with x as it is."""
    return [
        sum(float(w) * float(value) for w, value in zip(row, x, strict=True))
        + (0.0 if bias is None else float(bias[n]))
        for n, row in enumerate(matrix)
    ]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize(("biases", "count"), [(False, 1), (True, 3)])
def test_experts_are_networks_of_their_own(rounds: bool, activation: Activation, biases: bool, count: int) -> None:
    """Each chosen expert by itself, in the order of the routing; gates and ups large enough for the clamp."""
    rng = np.random.default_rng(3)
    graph = experts_graph(biases=biases, activation=activation, count=count)
    weights = Arrays(
        {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in graph.weights.values()},
        rounds=rounds,
    )
    step = step_of(weights)
    x = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
    chosen = np.stack([rng.permutation(EXPERTS)[:count] for _ in range(ROWS)])
    shares = rng.random((ROWS, count)).astype(np.float32)
    routing = np.concatenate([chosen, shares], axis=1).astype(np.float32)
    glu_node, down_node = (next(n for n in graph.nodes if n.op == op) for op in ("experts_glu", "experts_down"))
    (h,) = experts_glu(glu_node, [x, routing], step)
    (y,) = experts_down(down_node, [h, routing], step)

    def bias(name: str, expert: int) -> Any:
        return weights.values(f"{name}_bias")[expert] if biases else None

    def as_read(values: Table) -> Table:
        return rounded_activations(values[None], Rounding())[0] if rounds else values

    for row in range(ROWS):
        expected = np.zeros(HIDDEN)
        for slot in range(count):
            expert = int(chosen[row, slot])
            gate = product(weights.values("gate")[expert], as_read(x[row]), bias("gate", expert))
            up = product(weights.values("up")[expert], as_read(x[row]), bias("up", expert))
            own = h[row, slot * WIDTH : (slot + 1) * WIDTH]
            products = [act(*pair, activation) for pair in zip(gate, up, strict=True)]
            assert own == pytest.approx(products, abs=SUM_ERROR * np.abs(products).max() + 2e-5)
            down = product(weights.values("down")[expert], as_read(own), bias("down", expert))
            expected += float(shares[row, slot]) * np.array(down)
        assert y[row] == pytest.approx(expected, abs=SUM_ERROR * np.abs(expected).max() + 2e-5)


def test_the_clamp_of_swiglu_oai() -> None:
    gate = np.array([[-9.0, 2.0, 7.0, 9.0, 1.0, 1.0]], np.float32)
    up = np.array([[1.0, 1.0, 2.0, 2.0, -8.0, 30.0]], np.float32)
    found = activated(gate, up, "swiglu_oai")[0]
    assert found[3] == found[2]
    assert found[4] == activated(gate[:, 4:5], np.array([[-7.0]], np.float32), "swiglu_oai")[0, 0]
    assert found[5] == activated(gate[:, 5:6], np.array([[7.0]], np.float32), "swiglu_oai")[0, 0]
    assert found[0] == pytest.approx(-9 / (1 + math.exp(1.702 * 9)) * 2)
    assert (gate[0, 3], up[0, 5]) == (9.0, 30.0)  # the inputs are left alone
