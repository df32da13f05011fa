"""The definitions of the ops against loops that follow the formulas word by word, and the op table's own promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny_heads import tiny_head
from tiny_models import tiny_config

from paceline.config import Experts, ModelConfig, RopeConfig, RopeScaling
from paceline.errors import UnsupportedError
from paceline.models.registry import FAMILIES, build_graph
from paceline.ops.builder import GraphBuilder
from paceline.ops.reference import (
    KeyValues,
    Rounding,
    Step,
    attention,
    glu,
    inverse_frequencies,
    quantise_activations,
    quantise_vectors,
    rotate,
    rounded_activations,
)
from paceline.ops.spec import OPS
from paceline.weights.inventory import expected_shapes

FLOATS = st.floats(-1e4, 1e4, width=32)
CONFIGS = {
    "llama": tiny_config(),
    "untied": tiny_config(tie_embeddings=False),
    "qwen2": tiny_config(architecture="qwen2", attention_bias=True),
    "qwen3": tiny_config(architecture="qwen3", qk_norm=True),
    "gemma2": tiny_config(architecture="gemma2", logit_softcap=4.0),
    "mixtral": tiny_config(architecture="mixtral", experts=Experts(4, 2, 48)),
    "qwen3moe": tiny_config(architecture="qwen3moe", experts=Experts(4, 2, 48, dense_layers=(0,)), num_layers=3),
    "gpt-oss": tiny_config(
        architecture="gpt-oss",
        activation="swiglu_oai",
        experts=Experts(4, 2, 48, biases=True),
        attention_sinks=True,
        output_bias=True,
    ),
    "gemma3": tiny_config(architecture="gemma3", qk_norm=True, activation="gelu_tanh", logit_softcap=3.0),
    "phi3": tiny_config(architecture="phi3", tie_embeddings=False),
    "granite": tiny_config(architecture="granite", attention_bias=True, output_bias=True, residual_scale=0.2),
    "olmo2": tiny_config(architecture="olmo2", tie_embeddings=False),
    "exaone4": tiny_config(architecture="exaone4", qk_norm=True, sliding_window=9, windowed_layers=(True, False)),
    "smollm3": tiny_config(architecture="smollm3", unrotated_layers=(1,)),
    "eagle": tiny_head(input_norms=False),
    "eagle, normed": tiny_head(input_norms=True),
}


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=FLOATS))
@settings(max_examples=60, deadline=None)
def test_activations_are_rounded_group_by_group(x: np.ndarray) -> None:
    q, scale = quantise_activations(x)
    assert scale.shape == (len(x), -(-x.shape[1] // 32))
    for row in range(len(x)):
        for begin in range(0, x.shape[1], 32):
            group = x[row, begin : begin + 32]
            largest = max(abs(float(value)) for value in group)
            assert scale[row, begin // 32] == pytest.approx(largest / 127 if largest >= 1e-36 else 0.0, rel=1e-6)
            for value, code in zip(group, q[row, begin : begin + 32], strict=True):
                assert -127 <= code <= 127
                exact = float(value) * 127 / largest if largest >= 1e-36 else 0.0
                assert abs(exact - int(code)) <= 0.5 + 1e-4
    rounded = rounded_activations(x, Rounding())
    assert np.array_equal(rounded, (q * np.repeat(scale, 32, axis=1)[:, : x.shape[1]]).astype(np.float32))
    assert np.abs(rounded - x).max() <= np.abs(x).max() / 127 * 0.5001 + 1e-35


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=FLOATS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_activations_may_be_rounded_in_another_order_or_a_row_as_one(x: np.ndarray, per_token: bool) -> None:
    """Each group of the order by itself; columns come back to their places."""
    order = np.random.default_rng(x.size).permutation(x.shape[1]).astype(np.int32)
    rounded = rounded_activations(x, Rounding(per_token, order))
    size = x.shape[1] if per_token else 32
    for begin in range(0, x.shape[1], size):
        inputs = order[begin : begin + size]
        q, scale = quantise_activations(x[:, inputs], group=size)
        assert np.array_equal(rounded[:, inputs], (q * scale).astype(np.float32))
    assert Rounding(per_token, order).key != Rounding(per_token).key
    assert not Rounding(per_token, order).is_plain


def test_tiny_groups_become_zeros() -> None:
    """127 / max would overflow."""
    q, scale = quantise_activations(np.full((1, 32), 1e-37, np.float32))
    assert not q.any()
    assert not scale.any()


def test_pages_round_to_nearest_even_and_hold_no_infinity() -> None:
    pages = np.zeros((1, 1, 1, 1, 1), np.float32)
    f16, bf16 = (KeyValues(pages, pages, kind) for kind in ("f16", "bf16"))  # type: ignore[arg-type]
    assert f16.round(np.array([1e9, -1e9, 1 + 2**-11, 1 + 3 * 2**-11], np.float32)).tolist() == [
        65504.0,
        -65504.0,
        1.0,
        1 + 2**-9,
    ]
    assert bf16.round(np.array([1 + 2**-8, 1 + 3 * 2**-8, -3e38], np.float32))[:2].tolist() == [1.0, 1 + 2**-6]
    assert np.isfinite(bf16.round(np.array([3e38], np.float32))).all()


def int8_pages() -> KeyValues:
    pages = np.zeros((1, 1, 1, 1, 1), np.float32)
    return KeyValues(pages, pages, "int8")


@given(hnp.arrays(np.float32, (3, 2, 16), elements=st.floats(-1e4, 1e4, width=32)), st.integers(-100, 30))
@settings(max_examples=60, deadline=None)
def test_int8_pages_round_each_vector_alone(x: np.ndarray, exponent: int) -> None:
    x = (x * np.float32(2.0**exponent)).astype(np.float32)
    codes, scale = quantise_vectors(x)
    assert np.array_equal(scale.view(np.uint32) & 0xFFFF, np.zeros_like(scale, np.uint32))  # bf16
    assert np.array_equal(int8_pages().round(x), codes * scale)
    for token in range(3):
        for head in range(2):
            largest = max(abs(float(value)) for value in x[token, head])
            own = float(scale[token, head, 0])
            if largest < 2.0**-119:
                assert own == 0.0
                assert not codes[token, head].any()
                continue
            assert largest / 127 * (1 - 2**-23) <= own <= largest / 127 * (1 + 2**-7 + 2**-23)  # rounded up, one step
            for value, code in zip(x[token, head], codes[token, head], strict=True):
                assert abs(int(code)) <= 127
                assert abs(float(value) / own - int(code)) <= 0.5 + 1e-4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_pages_of_int8_and_f32(value: float) -> None:
    x = np.ones((2, 1, 16), np.float32)
    x[1, 0, 3] = value
    stored = int8_pages().round(x)
    assert np.isfinite(stored[0]).all()
    assert np.isnan(stored[1]).all()
    pages = np.zeros((1, 1, 1, 1, 1), np.float32)
    assert np.array_equal(KeyValues(pages, pages, "f32").round(x), x, equal_nan=True)


def test_tiny_and_empty_vectors_of_int8_pages() -> None:
    x = np.zeros((4, 1, 16), np.float32)
    x[1], x[2], x[3] = 1e-45, np.nextafter(np.float32(2.0**-119), np.float32(0)), 2.0**-119
    codes, scale = quantise_vectors(x)
    assert not codes[:3].any()
    assert not scale[:3].any()
    assert (codes[3] >= 126).all()
    assert scale[3] >= np.finfo(np.float32).tiny  # no subnormal scales


def test_rotation_turns_each_pair_as_a_complex_number() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, 8)).astype(np.float32)
    positions = np.array([0, 5, 900], np.int32)
    frequencies = inverse_frequencies(RopeConfig(10000.0, 6), 8)
    assert frequencies.tolist() == pytest.approx([1.0, 10000 ** (-2 / 6), 10000 ** (-4 / 6), 0.0])
    found = rotate(x, positions, frequencies)
    for row, position in enumerate(positions):
        for head in range(2):
            for pair in range(4):
                angle = float(position) * frequencies[pair]
                turned = complex(*x[row, head, 2 * pair : 2 * pair + 2]) * complex(math.cos(angle), math.sin(angle))
                assert found[row, head, 2 * pair] == pytest.approx(turned.real, abs=1e-6)
                assert found[row, head, 2 * pair + 1] == pytest.approx(turned.imag, abs=1e-6)
    assert np.array_equal(found[:, :, 6:], x[:, :, 6:])


def test_scaled_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0, 16), 16)
    linear = inverse_frequencies(RopeConfig(10000.0, 16, RopeScaling("linear", factor=4.0)), 16)
    assert linear == pytest.approx(plain / 4)
    factors = tuple(float(i + 1) for i in range(8))
    divided = inverse_frequencies(RopeConfig(10000.0, 16, RopeScaling("factors", factors=factors)), 16)
    assert divided == pytest.approx(plain / np.array(factors))
    scaling = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)
    llama3 = inverse_frequencies(RopeConfig(10000.0, 16, scaling), 16)
    for found, frequency in zip(llama3, plain, strict=True):  # the branches of Meta's release
        wavelength = 2 * math.pi / frequency
        if wavelength < 32 / 4.0:
            expected = frequency
        elif wavelength > 32 / 1.0:
            expected = frequency / 8
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert found == pytest.approx(expected)
    assert llama3[0] == plain[0]
    assert llama3[2] == pytest.approx(plain[2] / 8)
    assert plain[1] / 8 < llama3[1] < plain[1]


@pytest.mark.parametrize("window", [None, 1, 5])
def test_attention_is_a_softmax_over_what_a_row_may_see(window: int | None) -> None:
    config = tiny_config(sliding_window=window, num_layers=1)
    rng = np.random.default_rng(0)
    shape = (1, 3, config.num_kv_heads, 32, config.head_dim)
    kv = KeyValues(*(rng.standard_normal(shape).astype(np.float32) for _ in range(2)), "f16")
    positions = np.array([0, 34, 35, 2], np.int32)
    sequence_of_row = np.array([0, 1, 1, 0], np.int32)
    table = np.array([[1, 0], [2, 0]], np.int32)
    empty = np.zeros(0, np.int32)
    step = Step(config, None, kv, empty, positions, sequence_of_row, table, empty)  # type: ignore[arg-type]
    q = rng.standard_normal((4, config.q_size)).astype(np.float32)
    (found,) = attention(_node("attention", config), [q], step)
    for row, position in enumerate(positions):
        for head in range(config.num_heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            seen = [t for t in range(position + 1) if window is None or t > position - window]
            at = [(table[sequence_of_row[row], t // 32], head // 2, t % 32) for t in seen]
            scores = [math.exp(float(q[row, own] @ kv.keys[0][place])) for place in at]
            expected = sum(s / sum(scores) * kv.values[0][place] for s, place in zip(scores, at, strict=True))
            assert found[row, own] == pytest.approx(expected, abs=1e-5)


def test_silu_of_extreme_gates() -> None:
    gate = np.array([[-1e30, -200.0, 0.0, 3.0, 1e30]], np.float32)
    (found,) = glu(_node("glu"), [gate, np.ones_like(gate)], None)  # type: ignore[arg-type]
    assert found[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 3 / (1 + math.exp(-3)), 1e30])


def _node(op: str, config=None):  # type: ignore[no-untyped-def]
    """A node of the graph of a tiny model."""
    return next(node for node in build_graph(config or tiny_config()).nodes if node.op == op)


# ---- graphs ----


@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_reads_exactly_the_tensors_of_its_architecture(name: str) -> None:
    config = CONFIGS[name]
    graph = build_graph(config)
    assert {weight: spec.shape for weight, spec in graph.weights.items()} == expected_shapes(config)
    assert {weight for node in graph.nodes for weight in node.weights} == set(graph.weights)
    rotating = {weight for weight, spec in graph.weights.items() if spec.rope_heads}
    assert rotating == {weight for weight in graph.weights if "attn_q" in weight or "attn_k" in weight}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_made_before_they_are_read_and_once(name: str) -> None:
    graph = build_graph(CONFIGS[name])
    made: set[str] = set()
    for node in graph.nodes:
        assert node.op in OPS
        assert {value.name for value in node.inputs} <= made
        assert not {value.name for value in node.outputs} & made
        made |= {value.name for value in node.outputs}
    assert graph.logits.name in made
    assert graph.logits.rows == "outputs"


@pytest.mark.parametrize("name", CONFIGS)
def test_linear_work_is_two_operations_a_weight(name: str) -> None:
    config = CONFIGS[name]
    graph = build_graph(config)
    found = sum(OPS[node.op].flops(node, 10) for node in graph.nodes if node.op == "linear")
    matrices = [spec.shape for spec in graph.weights.values() if len(spec.shape) == 2 and spec.role != "experts"]
    embedding = config.vocab_size * config.hidden_size
    once = sum(math.prod(shape) for shape in matrices) - (0 if config.tie_embeddings else embedding)
    assert found == 2 * once


def test_the_work_of_experts_is_that_of_the_chosen_ones() -> None:
    config = tiny_config(architecture="mixtral", experts=Experts(5, 2, 48), num_layers=3)
    nodes = build_graph(config).nodes
    found = sum(OPS[node.op].flops(node, 10) for node in nodes if node.op.startswith("experts"))
    assert found == 3 * 2 * (2 * 3 * 48 * config.hidden_size)


def test_an_architecture_that_is_not_built_is_refused_by_name() -> None:
    config = tiny_config(architecture="gpt2")
    with pytest.raises(UnsupportedError, match=r"'gpt2'.*exaone4.*llama, mixtral, olmo2, phi3, qwen2, qwen3"):
        build_graph(config)
    assert {config.architecture for config in CONFIGS.values()} <= {family.architecture for family in FAMILIES}


def test_one_weight_has_one_shape() -> None:
    g = GraphBuilder()
    x = g.embed("w", vocab_size=4, width=8)
    with pytest.raises(AssertionError, match="w is used with shapes"):
        g.linear(x, [("w", 5)])


def test_every_op_of_the_table_is_used_by_some_family() -> None:
    used = {node.op for config in CONFIGS.values() for node in build_graph(config).nodes}
    assert used == set(OPS)


def test_a_family_cannot_be_asked_for_another_ones_parts() -> None:
    def names(config: ModelConfig) -> set[str]:
        return set(build_graph(config).weights)

    assert any("bias" in name for name in names(tiny_config(architecture="qwen2", attention_bias=False)))
    assert not any("q_norm" in name for name in names(tiny_config(architecture="qwen2", qk_norm=True)))
    assert any("q_norm" in name for name in names(tiny_config(architecture="qwen3", qk_norm=False)))
