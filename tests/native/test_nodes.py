"""The native executor against the reference, node by node: every weight format, family and instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from node_comparison import NUM_PAGES, assert_agrees, executors, steps, wrong_values
from tiny_models import changed, tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, step_plan

from paceline import _native
from paceline.config import KV_FORMATS, RopeConfig, RopeScaling
from paceline.errors import CheckpointError
from paceline.executors import compare
from paceline.executors.base import StepPlan
from paceline.executors.compare import compare_step
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.ops.graph import Value
from paceline.ops.reference import Table
from paceline.sampling.rows import NOT_FINITE
from paceline.weights.raw import BLOCK_KINDS

ISAS = _native.isas()

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "llama3-rope": {
        "rope": RopeConfig(
            10000.0,
            16,
            RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32),
        )
    },
    "partial-rope": {"rope": RopeConfig(10000.0, 8)},
    "window": {"sliding_window": 50},
    "one-kv-head": {"num_heads": 6, "num_kv_heads": 1},
    "as-many-kv-heads": {"num_heads": 3, "num_kv_heads": 3},
    "widest-heads": {"head_dim": 256, "num_layers": 1, "rope": RopeConfig(10000.0, 256)},
    "wide-heads": {"head_dim": 80, "rope": RopeConfig(10000.0, 80)},
    "heads-of-96": {"head_dim": 96, "rope": RopeConfig(10000.0, 96)},
    "heads-of-128": {"head_dim": 128, "rope": RopeConfig(10000.0, 96)},
    "qwen2": {"architecture": "qwen2", "attention_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 32, "rope": RopeConfig(10000.0, 32)},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_every_kind_as_the_file_holds_it(isa: str, kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "head_dim": 32, "num_layers": 1}
    wide = kind.endswith("_K") or kind.startswith(("Q4G", "Q8G"))
    config = tiny_config(**sizes, rope=RopeConfig(10000.0, 32)) if wide else tiny_config()
    assert_agrees(tiny_checkpoint(config, kind), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_formats_chosen_on_load(isa: str, weights: str, kv_dtype: str) -> None:
    checkpoint = tiny_checkpoint(tiny_config(hidden_size=80, intermediate_size=112))
    assert_agrees(checkpoint, isa=isa, weights=weights, kv_dtype=kv_dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", ["window", "one-kv-head", "wide-heads", "widest-heads"])
def test_int8_pages_of_every_shape_of_attention(isa: str, family: str) -> None:
    assert_agrees(tiny_checkpoint(tiny_config(**FAMILIES[family])), isa=isa, num_threads=2, kv_dtype="int8")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(isa: str, family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    kind = "F32" if config.q_size % 32 else "Q4_1"  # blocks of 32 need whole rows
    assert_agrees(tiny_checkpoint(config, kind), isa=isa, num_threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kinds",
    [
        {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q6_K"},
        {"attn_q.weight": "F16", "ffn_gate.weight": "Q8_0"},
        {"attn_k.weight": "F32", "ffn_up.weight": "BF16"},
        {"attn_output.weight": "BF16", "ffn_down.weight": "F16"},
    ],
    ids=["k-m", "gate", "up", "out"],
)
def test_tensors_of_one_layer_in_different_kinds(isa: str, kinds: dict[str, str]) -> None:
    config = tiny_config(hidden_size=256, intermediate_size=256, num_heads=16, num_layers=1)
    assert_agrees(tiny_checkpoint(config, "Q4_K", kinds=kinds), isa=isa)


@pytest.mark.parametrize("head_bits", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_head_bits(head_bits: str, tied: bool) -> None:
    config = tiny_config(tie_embeddings=tied, num_layers=1)
    assert_agrees(tiny_checkpoint(config, "Q4_1"), head_bits=head_bits)


def test_half_split_rope_rows_are_reordered_on_load() -> None:
    config = tiny_config(**FAMILIES["qwen3"])
    checkpoint = replace(tiny_checkpoint(config), interleaved_rope=False)
    assert_agrees(checkpoint, num_threads=2)


# ---- the comparison itself must see what is wrong, and where ----

WHERE = {
    "token_embd.weight": "x",
    "output_norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
    "blk.1.attn_norm.weight": "blk.1.attn_norm.weight",
    "blk.1.attn_q.weight": "blk.1.attn_q.weight",
    "blk.1.attn_k.weight": "blk.1.attn_k.weight",
    "blk.1.attn_v.weight": "blk.1.attn_v.weight",
    "blk.1.attn_output.weight": "blk.1.attn_output.weight.residual",
    "blk.1.ffn_norm.weight": "blk.1.ffn_norm.weight",
    "blk.1.ffn_gate.weight": "blk.1.ffn_gate.weight.glu",
    "blk.1.ffn_up.weight": "blk.1.ffn_gate.weight.glu",
    "blk.1.ffn_down.weight": "blk.1.ffn_down.weight.residual",
    "blk.1.attn_q.bias": "blk.1.attn_q.weight",
    "blk.1.attn_k.bias": "blk.1.attn_k.weight",
    "blk.1.attn_v.bias": "blk.1.attn_v.weight",
    "blk.1.attn_q_norm.weight": "blk.1.q",
    "blk.1.attn_k_norm.weight": "blk.1.q.pages",
}
"""Tensor -> the value that one wrong byte of it shows in; the others are right given their inputs."""


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
@pytest.mark.parametrize("tensor", WHERE)
def test_one_wrong_byte_is_reported_at_its_node(kind: str, tensor: str) -> None:
    config = tiny_config(tie_embeddings=False)
    if "bias" in tensor:
        config = replace(config, architecture="qwen2", attention_bias=True)
    if "_norm" in tensor and "attn_" in tensor:
        config = replace(config, architecture="qwen3", qk_norm=True)
    checkpoint = tiny_checkpoint(config, kind)
    raw = checkpoint.tensors[tensor]
    # A bit of an exponent: one float, or the scale of 32 weights, four times as large or small. Row 3 is a token's.
    at = {"F32": 4 * 3 + 3, "Q4_1": 1}[raw.kind]
    row_bytes = raw.data.size // raw.shape[0] if len(raw.shape) == 2 else 0
    at += 3 * row_bytes
    native, reference = executors(
        changed(checkpoint, tensor, at, raw.data[at] ^ (1 if raw.kind == "F32" else 8)), checkpoint
    )
    plan, _ = steps(config)[0]
    plan.tokens[5] = 3
    assert wrong_values(native, reference, [plan]) == {WHERE[tensor]}


@pytest.mark.parametrize("broken", ["x", "blk.0.attn_v.weight", "blk.0.attention", "blk.1.ffn_down.weight.residual"])
def test_what_is_not_a_number_is_reported_at_its_node(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint(tiny_config(), "F32")
    native, reference = executors(checkpoint, checkpoint)
    read = compare._native_value

    def with_nan(native: NativeExecutor, value: Value, expected: Table) -> tuple[Table, Table | float]:
        found, rounding = read(native, value, expected)
        if value.name == broken:
            found[1, 2] = np.nan
        return found, rounding

    monkeypatch.setattr(compare, "_native_value", with_nan)
    differences = compare_step(native, reference, steps(checkpoint.config)[0][0])
    assert next(one.value for one in differences if not one.bound_ratio <= 1) == broken


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_a_wrong_rope_frequency_is_reported_where_heads_rotate(kind: str) -> None:
    checkpoint = tiny_checkpoint(tiny_config(), kind)
    other = replace(checkpoint, config=replace(checkpoint.config, rope=RopeConfig(10100.0, 16)))
    native, reference = executors(other, checkpoint)
    expected = {f"blk.{layer}.q{stored}" for layer in range(2) for stored in ("", ".pages")}
    assert wrong_values(native, reference, [steps(checkpoint.config)[0][0]]) == expected


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
def test_an_ignored_window_is_reported_at_attention(kind: str, kv_dtype: str) -> None:
    checkpoint = tiny_checkpoint(tiny_config(sliding_window=50), kind)
    other = replace(checkpoint, config=replace(checkpoint.config, sliding_window=51))
    native, reference = executors(other, checkpoint, kv_dtype=kv_dtype)
    plans = [plan for plan, _ in steps(checkpoint.config)]
    assert wrong_values(native, reference, plans[:1]) == set()  # 37 tokens fit in either
    assert wrong_values(native, reference, plans[1:2]) == {"blk.0.attention", "blk.1.attention"}


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_a_stale_page_is_reported_at_attention(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    native, reference = executors(checkpoint, checkpoint, kv_dtype=kv_dtype)
    plans = [plan for plan, _ in steps(checkpoint.config)[:3]]
    assert wrong_values(native, reference, plans[:2]) == set()
    set_step = native.set_step

    def with_stale_page(plan: StepPlan, *tops: Any) -> None:
        table = plan.page_table.copy()
        table[0, 0] = NUM_PAGES - 1
        set_step(replace(plan, page_table=table), *tops)

    monkeypatch.setattr(native, "set_step", with_stale_page)
    assert wrong_values(native, reference, plans[2:]) == {"blk.0.attention", "blk.1.attention"}


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_page_copies_happen_before_the_step(kv_dtype: str) -> None:
    """A sequence that continues on a copy of another's page has the other's keys and values."""
    checkpoint = tiny_checkpoint(tiny_config(), "Q8_0")
    native, reference = executors(checkpoint, checkpoint, kv_dtype=kv_dtype)
    a, _ = random_sequences([40, 40], checkpoint.config.vocab_size)
    expected = []
    for executor in (native, reference):
        executor.run(step_plan([a.part(0, 20)]))
        executor.run(step_plan([a.part(20, 21)]))
        expected.append(executor.logits().copy())
    fork = replace(a, pages=np.array([9, 10], np.int32))
    plan = replace(step_plan([fork.part(20, 21)]), page_copies=np.array([[0, 9]], np.int32))
    for executor, logits in zip((native, reference), expected, strict=True):
        executor.run(plan)
        assert np.array_equal(executor.logits(), logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_a_step_without_outputs(isa: str, kind: str) -> None:
    """What most chunks of a long prompt are."""
    checkpoint = tiny_checkpoint(tiny_config(), kind)
    native, reference = executors(checkpoint, checkpoint, isa=isa, num_threads=2)
    a, _ = random_sequences([60, 1], checkpoint.config.vocab_size)
    assert (
        wrong_values(native, reference, [step_plan([a.part(0, 50)], outputs=[]), step_plan([a.part(50, 60)])]) == set()
    )
    reference.run(step_plan([a.part(0, 50)], outputs=[]))
    assert reference.logits().shape == (0, checkpoint.config.vocab_size)


def test_silu_of_gates_and_ups_of_different_formats_at_an_odd_width() -> None:
    """Without the fused record gate and up share a buffer: the rest of one must not read the other's values."""
    config = tiny_config(intermediate_size=48, num_layers=1)
    checkpoint = tiny_checkpoint(config, "F32", kinds={"ffn_gate.weight": "Q4_0"})
    engine = engine_config(config, num_pages=2, rows=16, weights="int4")
    native = NativeExecutor.load(checkpoint, engine)
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=2)
    (sequence,) = random_sequences([16], config.vocab_size)
    differences = compare_step(native, reference, step_plan([sequence.part(0, 16)]))
    assert not [difference for difference in differences if not difference.bound_ratio <= 1]


@pytest.mark.parametrize("tensor", ["blk.1.attn_k.weight", "blk.1.attn_output.weight", "blk.1.ffn_gate.weight"])
def test_outliers_are_no_difference(tensor: str) -> None:
    """The same weights on both sides, one scale of them 3e4 times as large: nothing is wrong."""
    checkpoint = tiny_checkpoint(tiny_config(tie_embeddings=False), "Q4_1")
    raw = checkpoint.tensors[tensor]
    at = 3 * (raw.data.size // raw.shape[0]) + 1
    assert_agrees(changed(checkpoint, tensor, at, raw.data[at] ^ 0x44))


@pytest.mark.parametrize("tensor", ["blk.1.attn_norm.weight", "output_norm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_refused_at_load(tensor: str, value: float) -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    data = checkpoint.tensors[tensor].data.copy()
    data.view(np.float32)[5] = value
    broken = replace(checkpoint, tensors={**checkpoint.tensors, tensor: replace(checkpoint.tensors[tensor], data=data)})
    with pytest.raises(CheckpointError, match=f"{tensor}.*not a number"):
        NativeExecutor.load(broken, engine_config(checkpoint.config, num_pages=2, rows=16))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lane", [0, 15, 16, 31])
def test_an_activation_that_is_not_a_number_ends_as_a_status(isa: str, lane: int) -> None:
    """Rounding to int8 must not turn it into a number: it has to reach the sampler, which reports it."""
    checkpoint = tiny_checkpoint(tiny_config(), "Q4_1")
    native = NativeExecutor.load(checkpoint, replace(engine_config(checkpoint.config, num_pages=2, rows=16), isa=isa))
    (sequence,) = random_sequences([4], checkpoint.config.vocab_size)
    plan = step_plan([sequence.part(0, 4)])
    native.run(plan)
    x = native.lowered.places["x"].buffer
    native.set_step(
        plan, np.zeros((len(plan.logit_rows), 0), np.int32), np.zeros((len(plan.logit_rows), 0), np.float32)
    )
    native.program.begin_step()
    embedded = native.lowered.made_by["x"] + 1
    native.program.run_records(0, embedded)
    native.program.buffer(x, 4)[3, lane] = np.nan
    native.program.run_records(embedded, native.program.num_records)
    count = len(plan.logit_rows)
    tokens, status, logprobs = np.zeros(count, np.int32), np.zeros(count, np.uint32), np.zeros(count, np.float32)
    native.program.results(tokens, status, logprobs)
    assert status[-1] == NOT_FINITE
    assert tokens[-1] == -1
