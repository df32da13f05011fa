"""What the dense families ask for beyond Llama's graph: scales, softcaps, sinks, windows and rotations that differ
between layers, norms in other places. Node by node against the reference, and bit by bit between chunks, threads and
instruction sets.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from graph_variants import FAMILIES, VARIANTS
from node_comparison import assert_agrees, executors, steps, wrong_values
from tiny_models import MemoryCheckpoint, changed, tiny_checkpoint, tiny_config
from token_sequences import TokenSequence, engine_config, random_sequences, run_chunks, run_step

from paceline import _native
from paceline.config import RopeConfig
from paceline.executors.native import NativeExecutor
from paceline.models import registry

ISAS = _native.isas()
LENGTH = 300
FORMATS = [("F32", "native", "f16"), ("F32", "int8", "f32"), ("F32", "int4", "int8"), ("F32", "bf16", "bf16")]


@pytest.fixture(autouse=True)
def _variants_are_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", registry.FAMILIES + FAMILIES)


def checkpoint_of(variant: str, **changes: Any) -> MemoryCheckpoint:
    return tiny_checkpoint(tiny_config(**VARIANTS[variant] | changes))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "weights", "kv_dtype"), FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_agrees_with_its_definition(variant: str, kind: str, weights: str, kv_dtype: str, isa: str) -> None:
    assert_agrees(checkpoint_of(variant), isa=isa, weights=weights, kv_dtype=kv_dtype, num_threads=2)


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_wide_heads(head_dim: int) -> None:
    rope = RopeConfig(10000.0, head_dim // 2)
    for variant in ("gemma", "oss"):
        checkpoint = checkpoint_of(variant, head_dim=head_dim, rope=rope, num_layers=2)
        assert_agrees(checkpoint, weights="int8", kv_dtype="int8" if variant == "oss" else "f16", num_threads=2)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("width", [48, 96])
def test_activations_where_gate_and_up_have_different_formats(activation: str, width: int) -> None:
    """Then the product is a record of its own."""
    config = tiny_config(activation=activation, intermediate_size=width, num_layers=1)
    assert_agrees(tiny_checkpoint(config, "F32", kinds={"ffn_gate.weight": "F16"}))
    assert_agrees(tiny_checkpoint(config, "F32", kinds={"ffn_gate.weight": "Q8_0"}))


@pytest.mark.parametrize(
    "kinds",
    [{"attn_v.weight": "F16"}, {"attn_q.weight": "Q8_0"}, {"ffn_gate.weight": "Q8_0"}, {"attn_q.weight": "Q8C"}],
    ids=str,
)
@pytest.mark.parametrize("variant", ["gemma", "olmo"])
def test_readers_of_one_norm_in_different_forms(variant: str, kinds: dict[str, str]) -> None:
    """Floats and int8 of one value, or an int8 form that is made after it: then no thread works on rows for itself."""
    config = tiny_config(**VARIANTS[variant])
    for threads in (1, 3):
        assert_agrees(tiny_checkpoint(config, "F32", kinds=kinds), num_threads=threads)
        assert_agrees(
            tiny_checkpoint(config, "Q8_0", kinds={"attn_output.weight": "F32", **kinds}), num_threads=threads
        )


# ---- what is wrong is seen, and where ----

WRONG: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "scale of the embedding": ("gemma", {"embedding_scale": 8.01}, {"x"}),
    "rotation of a layer with a window": (
        "gemma",
        {"local_rope": RopeConfig(510.0, 16)},
        {"blk.0.q", "blk.0.q.pages"},
    ),
    "one rotation for all": ("gemma", {"local_rope": None}, {"blk.0.q", "blk.0.q.pages"}),
    "scale of queries": ("granite", {"attention_scale": 0.0701}, {"blk.0.q", "blk.1.q"}),
    "a layer that rotates": ("olmo", {"unrotated_layers": ()}, {"blk.1.q", "blk.1.q.pages"}),
    "window of another layer": ("oss", {"windowed_layers": (True, True)}, {"blk.0.attention"}),
    "window one too short": ("oss", {"sliding_window": 59}, {"blk.1.attention"}),
    "softcap of scores": ("gemma", {"attention_softcap": 2.525}, {"blk.0.attention", "blk.1.attention"}),
    "no softcap of scores": ("gemma", {"attention_softcap": None}, {"blk.0.attention", "blk.1.attention"}),
    "softcap of logits": ("gemma", {"logit_softcap": 3.01}, {"token_embd.weight.softcap"}),
    "scale of logits": ("granite", {"logit_scale": 0.301}, {"token_embd.weight"}),
    "scale of what is added": (
        "granite",
        {"residual_scale": 0.221},
        {f"blk.{layer}.{part}.weight.residual" for layer in range(2) for part in ("attn_output", "ffn_down")},
    ),
    "activation": ("gemma", {"activation": "silu"}, {f"blk.{layer}.ffn_gate.weight.glu" for layer in range(2)}),
    "limit of an activation": (
        "oss",
        {"activation": "silu"},
        {f"blk.{layer}.ffn_gate.weight.glu" for layer in range(2)},
    ),
}
"""What -> variant, what only the native executor is told, the values that are then wrong."""


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_constant_is_reported_at_its_node(what: str) -> None:
    variant, changes, expected = WRONG[what]
    checkpoint = checkpoint_of(variant)
    native, reference = executors(replace(checkpoint, config=replace(checkpoint.config, **changes)), checkpoint)
    plans = [plan for plan, _ in steps(checkpoint.config)]
    assert wrong_values(native, reference, plans[:2]) == expected


@pytest.mark.parametrize(
    ("variant", "tensor", "expected"),
    [
        ("gemma", "blk.0.post_attention_norm.weight", "blk.0.post_attention_norm.weight.residual"),
        ("gemma", "blk.0.ffn_norm.weight", "blk.0.ffn_norm.weight"),
        ("gemma", "blk.0.post_ffw_norm.weight", "blk.0.post_ffw_norm.weight.residual"),
        ("gemma", "blk.1.attn_norm.weight", "blk.1.attn_norm.weight"),
        ("olmo", "blk.1.attn_q_norm.weight", "blk.1.attn_q_norm.weight"),
        ("olmo", "blk.1.attn_k_norm.weight", "blk.1.attn_k_norm.weight"),
        ("oss", "blk.1.attn_sinks.weight", "blk.1.attention"),
        ("oss", "blk.1.attn_output.bias", "blk.1.attn_output.weight.residual"),
    ],
)
@pytest.mark.parametrize("weights", ["native", "int8"])
def test_a_wrong_vector_is_reported_at_its_node(variant: str, tensor: str, expected: str, weights: str) -> None:
    checkpoint = checkpoint_of(variant)
    raw = checkpoint.tensors[tensor]
    at = 4 * 2 + 3  # an exponent
    native, reference = executors(changed(checkpoint, tensor, at, raw.data[at] ^ 1), checkpoint, weights=weights)
    plan, _ = steps(checkpoint.config)[0]
    assert wrong_values(native, reference, [plan]) == {expected}


# ---- bits ----


@lru_cache
def expected_bits(variant: str, weights: str, kv_dtype: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Of the logits of the request alone, whole, on one thread of the plainest instruction set."""
    executor = load(variant, weights=weights, kv_dtype=kv_dtype, isa="scalar", num_threads=1)
    logits = run_chunks(executor, the_request(), LENGTH)
    assert np.isfinite(logits).all()
    return logits.view(np.uint32)


def load(variant: str, **config: Any) -> NativeExecutor:
    checkpoint = checkpoint_of(variant)
    return NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=64, **config))


def the_request() -> TokenSequence:
    return random_sequences([LENGTH], tiny_config().vocab_size)[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("weights", "kv_dtype"), [("native", "f16"), ("int8", "int8")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_threads_and_instruction_sets_change_no_bit(variant: str, weights: str, kv_dtype: str, isa: str) -> None:
    expected = expected_bits(variant, weights, kv_dtype)
    for threads, chunk in ((1, 16), (2, 37), (3, LENGTH)):
        executor = load(variant, weights=weights, kv_dtype=kv_dtype, isa=isa, num_threads=threads)
        assert np.array_equal(run_chunks(executor, the_request(), chunk).view(np.uint32), expected), (threads, chunk)
    for threads in (1, 2, 3):  # one and two rows, that every thread norms for itself; then past both windows
        executor = load(variant, weights=weights, kv_dtype=kv_dtype, isa=isa, num_threads=threads)
        for begin, end in [(0, 1), (1, 3), (3, 6), (6, 262), (262, 263), (263, 265), (265, 266), (266, 273)]:
            (logits,), _ = run_step(executor, [the_request().part(begin, end)])
            assert np.array_equal(logits.view(np.uint32), expected[begin:end]), (threads, begin)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
@pytest.mark.parametrize("variant", ["gemma", "oss"])
def test_sharing_a_prefix_changes_no_bit(variant: str, kv_dtype: str, isa: str) -> None:
    """Layers with a window and without are divided by plans of their own; sinks are folded after the merge of both."""
    executor = load(variant, weights="int8", kv_dtype=kv_dtype, isa=isa, num_threads=2)
    request = the_request()
    expected = expected_bits(variant, "int8", kv_dtype)
    run_step(executor, [request.part(0, 266)])
    twins = [
        replace(request, pages=np.concatenate([request.pages[:8], np.arange(10 + 2 * i, 12 + 2 * i, dtype=np.int32)]))
        for i in range(6)
    ]
    run_step(executor, [twin.part(256, 266) for twin in twins])
    logits, _ = run_step(executor, [twin.part(266, 267) for twin in twins])
    assert executor.program.shared_splits > 0
    for found in logits:
        assert np.array_equal(found.view(np.uint32), expected[266:267])
