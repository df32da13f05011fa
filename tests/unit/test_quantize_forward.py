"""The layer by layer forward pass is the reference executor's arithmetic, for every family and order of rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config

from paceline.config import Activation, EngineConfig, ModelConfig, RopeConfig
from paceline.errors import CheckpointError
from paceline.executors.base import StepPlan
from paceline.executors.reference import ReferenceExecutor
from paceline.ops import reference
from paceline.quantize.forward import SequenceForward, activated, attend, checkpoint_values, stages_of
from paceline.sampling.rows import greedy_rows

LENGTH = 40


def reference_hidden(checkpoint: MemoryCheckpoint, tokens: np.ndarray) -> np.ndarray:
    config = EngineConfig(weights="f32", kv_dtype="f32")
    executor = ReferenceExecutor.load(checkpoint, config, num_pages=2, activations="float")
    plan = StepPlan(
        tokens=tokens,
        positions=np.arange(len(tokens), dtype=np.int32),
        row_starts=np.array([0, len(tokens)], np.int32),
        page_table=np.array([[0, 1]], np.int32),
        logit_rows=np.array([0], np.int32),
        samples=greedy_rows(1),
    )
    executor.run(plan)
    return executor.hidden()


def forward_hidden(checkpoint: MemoryCheckpoint, tokens: np.ndarray, **changed: object) -> np.ndarray:
    forward = SequenceForward(checkpoint, **changed)  # type: ignore[arg-type]
    values: dict[str, np.ndarray] = {}
    for stage in forward.stages:
        forward.run(stage, values, tokens)
    assert set(values) == {forward.graph.hidden.name}
    return values[forward.graph.hidden.name]


FAMILIES = [
    tiny_config(),
    tiny_config(sliding_window=7),
    tiny_config(architecture="qwen2", attention_bias=True),
    tiny_config(architecture="qwen3", qk_norm=True),
    tiny_config(
        architecture="gemma2",
        activation="gelu_tanh",
        sliding_window=7,
        windowed_layers=(True, False),
        embedding_scale=8.0,
        attention_scale=0.3,
        attention_softcap=5.0,
    ),
    tiny_config(
        architecture="gemma3",
        qk_norm=True,
        activation="gelu_tanh",
        sliding_window=7,
        windowed_layers=(True, False),
        local_rope=RopeConfig(100.0, 16),
    ),
]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("config", FAMILIES, ids=["llama", "window", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_hidden_states_are_those_of_the_reference_executor(config: ModelConfig, interleaved: bool) -> None:
    checkpoint = tiny_checkpoint(config)
    checkpoint.interleaved_rope = interleaved
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (3, LENGTH)).astype(np.int32)
    hidden = forward_hidden(checkpoint, tokens)
    for row in range(3):
        expected = reference_hidden(checkpoint, tokens[row])
        # A few hundred float32 additions on each of some ten levels: relative to the largest value, not to each.
        np.testing.assert_allclose(hidden[row], expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_activations_are_those_of_the_reference(activation: Activation) -> None:
    rng = np.random.default_rng(3)
    gate, up = (rng.standard_normal((7, 33)).astype(np.float32) * 6 for _ in range(2))
    expected = reference.activated(gate, up, activation)
    # 1 + tanh of a negative gate cancels: what is left may be off by the rounding of 1.
    bound = 1e-5 * np.abs(expected) + 4 * np.finfo(np.float32).eps * np.abs(gate * (np.abs(up) + 1))
    assert (np.abs(activated(gate, up, activation) - expected) <= bound).all()


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0}, {"sinks": True}])
def test_attention_is_the_softmax_of_the_reference(options: dict[str, Any]) -> None:
    """Word by word: capped scores, a sink that takes its share and has no value, keys out of the window."""
    model, rng = tiny_config(), np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 9, width)).astype(np.float32) for width in (64, 32, 32))
    sinks = rng.standard_normal(4).astype(np.float32)
    found = attend(q, k, v, model, **({"sinks": sinks} if "sinks" in options else options))
    cap, window = options.get("softcap"), options.get("window", 9)
    for row, head in itertools.product(range(9), range(4)):
        own, shared = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        seen = range(max(0, row - window + 1), row + 1)
        scores = [float(q[0, row, own] @ k[0, t, shared]) for t in seen]
        terms = [math.exp(score if cap is None else cap * math.tanh(score / cap)) for score in scores]
        total = sum(terms) + (math.exp(sinks[head]) if "sinks" in options else 0.0)
        expected = sum(term / total * v[0, t, shared] for term, t in zip(terms, seen, strict=True))
        np.testing.assert_allclose(found[0, row, own], expected, rtol=1e-4, atol=1e-5)


def test_changed_tables_stand_in_for_the_file_and_rows_keep_its_order() -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    checkpoint.interleaved_rope = False
    tokens = np.arange(30, dtype=np.int32).reshape(1, -1)
    name = "blk.0.attn_q.weight"
    same = forward_hidden(checkpoint, tokens, changed=lambda n: checkpoint_values(checkpoint, n) if n == name else None)
    np.testing.assert_array_equal(same, forward_hidden(checkpoint, tokens))
    table = checkpoint_values(checkpoint, name) * 0
    other = forward_hidden(checkpoint, tokens, changed=lambda n: table if n == name else None)
    assert not np.array_equal(other, same)


def test_stages_begin_with_a_product_and_know_what_crosses_them() -> None:
    forward = SequenceForward(tiny_checkpoint(tiny_config()))
    stages = stages_of(forward.graph)
    assert [len(stage.matrices) for stage in stages] == [0, 3, 1, 2, 1, 3, 1, 2, 1]
    for before, after in itertools.pairwise(stages):
        assert after.input in before.leaves


def test_a_value_that_is_not_finite_is_refused_by_name() -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    name = "blk.1.ffn_up.weight"
    checkpoint.tensors[name].data.view(np.float32)[5] = np.nan
    with pytest.raises(CheckpointError, match=name):
        checkpoint_values(checkpoint, name)
