"""Every op in torch against its definition, on the definition's own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import tiny_config

from paceline.config import PAGE_TOKENS, RopeConfig, RopeScaling
from paceline.executors.base import StepPlan
from paceline.executors.torch.attention import PagedContext, SplitAttention
from paceline.executors.torch.operations import OPERATIONS, Pass, activated
from paceline.executors.torch.pages import PagePool, quantise_vectors
from paceline.executors.torch.rotation import RotationTable
from paceline.executors.torch.rows import Rows
from paceline.executors.torch.weights import Parameters
from paceline.ops import reference
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value
from paceline.ops.reference import KeyValues, Rounding, Step, Table
from paceline.ops.spec import OPS
from paceline.sampling.rows import greedy_rows

MODEL = tiny_config(num_layers=1)
HIDDEN, FFN, VOCAB = MODEL.hidden_size, MODEL.intermediate_size, MODEL.vocab_size
EXPERTS, CHOSEN = 5, 2
YARN = RopeConfig(10000.0, 8, RopeScaling("yarn", factor=4.0, original_context=64, attention_factor=1.3))
NUM_PAGES = 14
CPU = torch.device("cpu")


class Numbers:
    """Random weights of a graph, as the definitions read them."""

    def __init__(self, graph: Graph) -> None:
        rng = np.random.default_rng(0)
        self.tables = {
            name: (rng.standard_normal(spec.shape) / (np.sqrt(spec.shape[-1]) if len(spec.shape) > 1 else 1.0)).astype(
                np.float32
            )
            for name, spec in graph.weights.items()
        }

    def values(self, name: str) -> Table:
        return self.tables[name]

    def magnitudes(self, name: str) -> Table:
        return np.abs(self.tables[name])

    def rounding(self, name: str) -> Rounding | None:
        return None


def decoder(
    *,
    rope: RopeConfig | None = YARN,
    head_norms: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    biases: bool = False,
    activation: Any = "silu",
    experts: bool = False,
    normalise: bool = True,
) -> Graph:
    """One layer with what is asked for; every scale is unusual."""
    g = GraphBuilder()
    x = g.add(
        g.embed("embedding", vocab_size=VOCAB, width=HIDDEN, scale=1.5),
        g.linear(g.features(HIDDEN), [("features.weight", HIDDEN)], scale=0.7)[0],
    )
    q, k, v = g.linear(
        g.rms_norm(x, "norm", eps=1e-5),
        [("q", MODEL.q_size), ("k", MODEL.kv_size), ("v", MODEL.kv_size)],
        biases=["q.bias", "k.bias", "v.bias"] if biases else [],
    )
    norms = {f"{part}_norm": g.head_norm_weight(f"{part}.norm", MODEL.head_dim) for part in "qk"} if head_norms else {}
    q = g.rope_write(q, k, v, layer=0, rope=rope, scale=0.4, eps=1e-6, **norms)
    sink = g.vector("sinks", MODEL.num_heads) if sinks else None
    x = g.add(x, g.attention(q, layer=0, window=window, softcap=softcap, sinks=sink))
    x = g.add(x, _experts(g, x, activation, biases, normalise) if experts else _feed_forward(g, x, activation))
    (logits,) = g.linear(g.select_outputs(x), [("head", VOCAB)], role="head", scale=0.3)
    return g.finish(g.softcap(logits, cap=1.5))


def _feed_forward(g: GraphBuilder, x: Value, activation: Any) -> Value:
    gate, up = g.linear(x, [("gate", FFN), ("up", FFN)])
    return g.linear(g.glu(gate, up, activation=activation), [("down", HIDDEN)])[0]


def _experts(g: GraphBuilder, x: Value, activation: Any, biases: bool, normalise: bool) -> Value:
    (scores,) = g.linear(x, [("router", EXPERTS)], role="router")
    routing = g.route(scores, num_chosen=CHOSEN, normalise=normalise)
    h = g.experts_glu(
        x,
        routing,
        ("gates", "ups"),
        num_experts=EXPERTS,
        width=FFN,
        activation=activation,
        biases=("gates.bias", "ups.bias") if biases else None,
    )
    return g.experts_down(
        h, routing, "downs", num_experts=EXPERTS, outputs=HIDDEN, bias="downs.bias" if biases else None
    )


GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain": decoder,
    "gemma": lambda: decoder(head_norms=True, window=70, softcap=2.0, activation="gelu_tanh"),
    "oss": lambda: decoder(sinks=True, window=5, biases=True, activation="swiglu_oai", experts=True),
    "unrotated": lambda: decoder(rope=None, sinks=True, softcap=3.0, experts=True, normalise=False),
}


def plan() -> StepPlan:
    """Rows of three sequences, one of which is at position 300, and whose fourth shares what another computes."""
    lengths, begins = [4, 1, 9, 2], [300, 40, 0, 129]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rng = np.random.default_rng(5)
    table = rng.permutation(NUM_PAGES).astype(np.int32)[None].repeat(4, axis=0)
    table[1:, :2] = [[table[0, 10], table[0, 11]]] * 3  # pages that the first sequence does not reach
    table[2, :2], table[3] = table[0, 12], np.roll(table[0], 3)
    return StepPlan(
        tokens=rng.integers(0, VOCAB, starts[-1], dtype=np.int32),
        positions=np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)]).astype(np.int32),
        row_starts=starts,
        page_table=table,
        logit_rows=np.array([3, 4, 13, 15], np.int32),
        samples=greedy_rows(4),
        kv_writes=np.array([[1, 1], [5, 3]], np.int32),
        features=rng.standard_normal((starts[-1], HIDDEN)).astype(np.float32),
    )


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("rows", [Rows(), Rows(4), Rows(16, 16)], ids=str)
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_is_as_defined(name: str, kv_dtype: Any, rows: Rows, gradients: bool) -> None:
    """A sum of n <= 304 products errs by n eps of its terms' magnitudes at most; these are of about 1, so 1e-5 has room
    for twenty such. Stored numbers are the definition's to the bit, but for keys, whose rotation may fall on the other
    side of a rounding."""
    graph, step_plan = GRAPHS[name](), plan()
    numbers = Numbers(graph)
    pool = PagePool(MODEL, kv_dtype, NUM_PAGES, CPU)
    kv = _random_pages(pool)
    definition = Step(
        MODEL,
        numbers,
        kv,
        step_plan.tokens,
        step_plan.positions,
        np.repeat(np.arange(4, dtype=np.int32), np.diff(step_plan.row_starts)),
        step_plan.page_table,
        step_plan.logit_rows,
        "float",
        step_plan.kv_writes,
        step_plan.features,
    )
    here = Pass(
        Parameters({key: torch.from_numpy(table) for key, table in numbers.tables.items()}),
        PagedContext(pool, SplitAttention(rows), step_plan),
        {YARN: RotationTable(YARN, MODEL.head_dim, CPU)},
        MODEL.head_dim,
        torch.from_numpy(step_plan.tokens.astype(np.int64)),
        torch.from_numpy(step_plan.positions.astype(np.int64)),
        int(step_plan.positions.max()) + 1,
        torch.from_numpy(step_plan.logit_rows.astype(np.int64)),
        torch.from_numpy(step_plan.features),
    )
    values: dict[str, Table] = {}
    for node in graph.nodes:
        inputs = [values[value.name] for value in node.inputs]
        expected = OPS[node.op].reference(node, inputs, definition)
        with torch.set_grad_enabled(gradients):
            found = OPERATIONS[node.op](node, [torch.from_numpy(x) for x in inputs], here)
        for value, mine, theirs in zip(node.outputs, found, expected, strict=True):
            assert mine.shape == theirs.shape
            assert np.abs(mine.numpy() - theirs).max() < 1e-5 * (1 + np.abs(theirs).max()), value.name
            values[value.name] = theirs
        if node.op == "rope_write":
            _assert_same_pages(pool, kv)


def _random_pages(pool: PagePool) -> KeyValues:
    """Fills the pool; the same numbers as the definition has them."""
    rng = np.random.default_rng(2)
    shape = (1, NUM_PAGES, MODEL.num_kv_heads, PAGE_TOKENS, MODEL.head_dim)
    kv = KeyValues(np.zeros(shape, np.float32), np.zeros(shape, np.float32), pool.format)
    for page in range(NUM_PAGES):
        k, v = rng.standard_normal((2, PAGE_TOKENS, MODEL.num_kv_heads, MODEL.head_dim)).astype(np.float32)
        places = torch.full((PAGE_TOKENS,), page), torch.arange(PAGE_TOKENS)
        pool.write(0, torch.from_numpy(k), torch.from_numpy(v), *places)
        kv.keys[0, page], kv.values[0, page] = (kv.round(x).swapaxes(0, 1) for x in (k, v))
    _assert_same_pages(pool, kv)
    return kv


def _assert_same_pages(pool: PagePool, kv: KeyValues) -> None:
    numbers = pool.numbers.float() if pool.scales is None else pool.numbers.float() * pool.scales.float()[..., None]
    keys, values = numbers[:, 0].numpy().swapaxes(0, 1)
    assert np.array_equal(values, kv.values[0])
    step_size = {"f32": 2.0**-22, "f16": 2.0**-10, "bf16": 2.0**-7, "int8": 0.0}[pool.format]
    largest = np.abs(kv.keys[0]).max(axis=-1, keepdims=True)
    bound = step_size * np.abs(kv.keys[0]) + largest * (1.01 / 126 if pool.format == "int8" else 2.0**-21)
    assert (np.abs(keys - kv.keys[0]) <= bound).all()


def test_every_op_is_met() -> None:
    met = {node.op for make in GRAPHS.values() for node in make().nodes}
    assert met == set(OPS) == set(OPERATIONS)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("gradients", [False, True])
def test_activations_of_large_numbers_are_as_defined(activation: Any, gradients: bool) -> None:
    """Beyond +-7, where swiglu_oai is cut off; the other ones have numbers of up to 900, of which 1e-5 is taken."""
    at = np.linspace(-30, 30, 121).astype(np.float32)
    gate, up = (x.reshape(1, -1) for x in np.meshgrid(at, at))
    g = GraphBuilder()
    x = g.features(HIDDEN)
    node = g.finish(g.glu(x, x, activation=activation)).nodes[-1]
    (expected,) = OPS["glu"].reference(node, [gate, up], None)  # type: ignore[arg-type]
    with torch.set_grad_enabled(gradients):
        found = activated(torch.from_numpy(gate), torch.from_numpy(up), activation).numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    logits = np.random.default_rng(0).integers(0, 3, (40, 33)).astype(np.float32)
    g = GraphBuilder()
    node = g.finish(g.route(g.features(33), num_chosen=5, normalise=True)).nodes[-1]
    (expected,) = OPS["route"].reference(node, [logits], None)  # type: ignore[arg-type]
    (found,) = OPERATIONS["route"](node, [torch.from_numpy(logits)], None)  # type: ignore[arg-type]
    assert np.array_equal(found[:, :5].numpy(), expected[:, :5])
    assert np.abs(found.numpy() - expected).max() < 1e-6


def test_a_table_of_turns_grows_with_the_positions() -> None:
    whole = RotationTable(YARN, MODEL.head_dim, CPU).turn(torch.arange(600), 600)
    table = RotationTable(YARN, MODEL.head_dim, CPU)
    for end in (1, 256, 257, 512, 513, 600):
        cos, sin = table.turn(torch.arange(end), end)
        assert torch.equal(cos, whole[0][:end])
        assert torch.equal(sin, whole[1][:end])


def test_vectors_are_rounded_to_int8_as_defined() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((50, 16)) * 10.0 ** rng.integers(-38, 30, (50, 1))).astype(np.float32)
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 0] = np.inf
    codes, scales = quantise_vectors(torch.from_numpy(x))
    expected, expected_scales = reference.quantise_vectors(x)
    assert np.array_equal(codes.numpy(), expected)
    assert np.array_equal(scales.numpy(), expected_scales[:, 0], equal_nan=True)


def test_f16_pages_clip_what_f16_cannot_hold() -> None:
    pool = PagePool(MODEL, "f16", 1, CPU)
    x: NDArray[np.float32] = np.full((1, MODEL.num_kv_heads, MODEL.head_dim), 1e6, np.float32)
    place = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    pool.write(0, torch.from_numpy(x), torch.from_numpy(-x), *place)
    assert pool.numbers[0, 0, 0, :, 0].max() == 65504.0
    assert pool.numbers[0, 0, 1, :, 0].min() == -65504.0
