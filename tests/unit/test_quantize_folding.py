"""Folding scales into whoever makes a matrix's inputs: the model stays the same function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config

from paceline.config import ModelConfig
from paceline.models.registry import build_graph
from paceline.ops.graph import Graph, Node
from paceline.ops.reference import inverse_frequencies, rotate
from paceline.quantize.folding import Producer, can_divide_rows, divide_quantized_rows, divide_rows, producer_of
from paceline.quantize.forward import SequenceForward, Values
from paceline.weights.quantized_matrix import QuantizedMatrix

Doubles = NDArray[np.float64]
Tensors = dict[str, Doubles]

TOKENS = np.array([[5, 70, 3, 3, 41, 9, 0, 12]], np.int32)


def llama() -> ModelConfig:
    return tiny_config()


def with_biases() -> ModelConfig:
    return tiny_config(architecture="qwen2", attention_bias=True)


def with_head_norms() -> ModelConfig:
    return tiny_config(architecture="qwen3", qk_norm=True)


FAMILIES = [llama, with_biases, with_head_norms]


def layer_products(graph: Graph) -> Iterator[Node]:
    return (n for n in graph.nodes if n.op == "linear" and graph.weights[n.weights[0]].role == "layer")


def tensors_of(checkpoint: MemoryCheckpoint) -> Tensors:
    return {
        name: raw.data.view("<f4").reshape(raw.shape).astype(np.float64) for name, raw in checkpoint.tensors.items()
    }


def folded(config: ModelConfig, tensors: Tensors, rng: np.random.Generator, *, powers_of_two: bool) -> Tensors:
    """All scales that can be folded, drawn and folded."""
    tensors = dict(tensors)
    graph = build_graph(config)
    for node in layer_products(graph):
        producer = producer_of(graph, node, config)
        assert producer is not None, node.name
        num_rows = len(tensors[producer.weight])
        exponents = rng.integers(-3, 4, num_rows) if powers_of_two else rng.uniform(-3, 3, num_rows)
        scale = 2.0**exponents
        for name in producer.tensors:
            tensors[name] = divide_rows(tensors[name], scale)
        for name in node.weights[: len(node.outputs)]:
            tensors[name] = tensors[name] * producer.spread(scale)
    return tensors


def plain_model(config: ModelConfig, tensors: Tensors, tokens: NDArray[np.int32]) -> Doubles:
    """The residual stream of one sequence after the last layer, in float64, head by head."""

    def norm(x: Doubles, name: str) -> Doubles:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * tensors[name]

    def product(x: Doubles, name: str) -> Doubles:
        return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", np.zeros(1))

    def heads(x: Doubles, name: str) -> Doubles:
        x = x.reshape(len(x), -1, config.head_dim)
        x = norm(x, name + "_norm.weight") if config.qk_norm else x
        return rotate(x, np.arange(len(x), dtype=np.int32), inverse_frequencies(config.rope, config.head_dim))

    x = tensors["token_embd.weight"][tokens]
    for layer in range(config.num_layers):
        p = f"blk.{layer}."
        h = norm(x, p + "attn_norm.weight")
        q, k = (heads(product(h, p + name), p + name) for name in ("attn_q", "attn_k"))
        v = product(h, p + "attn_v").reshape(len(x), -1, config.head_dim)
        out = np.zeros((len(x), config.num_heads, config.head_dim))
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            for row in range(len(x)):
                scores = np.exp(k[: row + 1, shared] @ q[row, head] / np.sqrt(config.head_dim))
                out[row, head] = scores @ v[: row + 1, shared] / scores.sum()
        x = x + product(out.reshape(len(x), -1), p + "attn_output")
        h = norm(x, p + "ffn_norm.weight")
        gate, up = product(h, p + "ffn_gate"), product(h, p + "ffn_up")
        x = x + product(gate / (1 + np.exp(-gate)) * up, p + "ffn_down")
    return x


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_layer_has_inputs_that_can_be_scaled(family) -> None:
    config = family()
    graph = build_graph(config)
    producers = [producer_of(graph, node, config) for node in layer_products(graph)]
    bias = "blk.0.attn_v.bias" if config.attention_bias else None
    assert producers[:4] == [
        Producer("blk.0.attn_norm.weight"),
        Producer("blk.0.attn_v.weight", bias, repeats=2, width=16),
        Producer("blk.0.ffn_norm.weight"),
        Producer("blk.0.ffn_up.weight"),
    ]


def test_inputs_that_somebody_else_reads_are_left_alone() -> None:
    config = tiny_config()
    graph = build_graph(config)
    for node in layer_products(graph):
        reader = Node("add", (node.inputs[0], node.inputs[0]), (replace(node.inputs[0], name="other"),))
        assert producer_of(replace(graph, nodes=(*graph.nodes, reader)), node, config) is None
    for producer in ("blk.0.attn_v.weight", "blk.0.ffn_up.weight"):
        product = next(n for n in graph.nodes if producer in n.weights)
        value = product.outputs[product.weights.index(producer)]
        reader = Node("add", (value, value), (replace(value, name="other"),))
        watched = replace(graph, nodes=(*graph.nodes, reader))
        assert producer not in {p.weight for n in layer_products(watched) if (p := producer_of(watched, n, config))}


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_powers_of_two_leave_the_same_bits(family) -> None:
    rng = np.random.default_rng(1)
    config = family()
    checkpoint = tiny_checkpoint(config)
    changed = folded(config, tensors_of(checkpoint), rng, powers_of_two=True)
    before = hidden(checkpoint, {})
    after = hidden(checkpoint, {name: table.astype(np.float32) for name, table in changed.items()})
    np.testing.assert_array_equal(before.view(np.uint32), after.view(np.uint32))
    changed["blk.1.ffn_up.weight"] = changed["blk.1.ffn_up.weight"] * 2
    wrong = hidden(checkpoint, {name: table.astype(np.float32) for name, table in changed.items()})
    assert not np.array_equal(before, wrong)


def hidden(checkpoint: MemoryCheckpoint, changed: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    forward = SequenceForward(checkpoint, changed.get)
    values: Values = {}
    for stage in forward.stages:
        forward.run(stage, values, TOKENS)
    return values[forward.graph.hidden.name]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_folded_scales_leave_the_same_function(family) -> None:
    """In float64. Each of some 20 products and sums in a row loses 2^-53 of its terms, a hundred of them at most."""
    rng = np.random.default_rng(1)
    config = family()
    tensors = tensors_of(tiny_checkpoint(config))
    before = plain_model(config, tensors, TOKENS[0])
    after = plain_model(config, folded(config, tensors, rng, powers_of_two=False), TOKENS[0])
    assert np.abs(after - before).max() <= 2000 * 2.0**-53 * np.abs(before).max()


def test_query_heads_of_a_group_share_their_scales() -> None:
    producer = Producer("v", repeats=2, width=3)
    rows = np.arange(6, dtype=np.float32)
    inputs = producer.spread(rows)
    np.testing.assert_array_equal(inputs, [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5])
    np.testing.assert_array_equal(producer.pool(inputs, np.max), rows)
    uneven = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(producer.pool(uneven, np.mean), [1.5, 2.5, 3.5, 7.5, 8.5, 9.5])


def test_rows_of_codes_are_divided_by_their_scales() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (6, 64)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, (6, 2)).astype(np.float16)
    matrix = QuantizedMatrix(codes, scale, rng.integers(0, 16, (6, 2)).astype(np.uint8), 4, 32)
    powers = 2.0 ** rng.integers(-3, 4, 6).astype(np.float32)
    np.testing.assert_array_equal(divide_quantized_rows(matrix, powers).values(), divide_rows(matrix.values(), powers))
    any_scale = rng.uniform(0.1, 10, 6).astype(np.float32)
    exact = divide_rows(matrix.values(), any_scale)
    error = np.abs(divide_quantized_rows(matrix, any_scale).values() - exact)
    assert (error <= 2.0**-11 * 1.001 * np.abs(exact)).all()
    assert can_divide_rows(matrix, any_scale)
    for impossible in (1e-7, 1e7):
        assert not can_divide_rows(matrix, np.full(6, impossible, np.float32))
