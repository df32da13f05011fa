"""Kernels at awkward sizes, and what the step refuses, through the bindings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MemoryCheckpoint, as_f32, tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_chunks, run_step, step_plan

from paceline import _native
from paceline.config import KV_FORMATS, EngineConfig, KVFormat, RopeConfig
from paceline.errors import ParameterError
from paceline.executors.base import StepPlan
from paceline.executors.compare import compare_step, pages_of
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.kv.layout import KVLayout
from paceline.ops.reference import KeyValues

ISAS = _native.isas()


def load(checkpoint: MemoryCheckpoint, *, num_pages: int = 4, **config: Any) -> NativeExecutor:
    return NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=num_pages, rows=64, **config))


@st.composite
def shapes(draw: st.DrawFn) -> MemoryCheckpoint:
    """Models of any width: one component to several vectors and a rest."""
    head_dim = draw(st.sampled_from([16, 32, 48, 256]))
    num_kv_heads = draw(st.integers(1, 3))
    config = tiny_config(
        num_layers=1,
        hidden_size=draw(st.integers(1, 100)),
        intermediate_size=draw(st.integers(1, 100)),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig(10000.0, 2 * draw(st.integers(0, head_dim // 2))),
        vocab_size=draw(st.integers(1, 70)),
        tie_embeddings=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 12)),
    )
    if draw(st.booleans()):
        config = replace(config, architecture="qwen2", attention_bias=True)
    elif draw(st.booleans()):
        config = replace(config, architecture="qwen3", qk_norm=True)
    return tiny_checkpoint(config, draw(st.sampled_from(["F32", "F16", "BF16"])), seed=draw(st.integers(0, 99)))


@settings(max_examples=40, deadline=None)
@given(
    shapes(),
    st.sampled_from(["native", "bf16", "int8", "int4"]),
    st.sampled_from(KV_FORMATS),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_any_shape_agrees_with_the_reference_and_between_instruction_sets(
    checkpoint: MemoryCheckpoint, weights: str, kv_dtype: str, rows: int, more_rows: int
) -> None:
    engine = engine_config(checkpoint.config, num_pages=2, rows=16, weights=weights, kv_dtype=kv_dtype)
    (sequence,) = random_sequences([rows + more_rows], checkpoint.config.vocab_size)
    bits = []
    for isa in ISAS:
        native = NativeExecutor.load(checkpoint, replace(engine, isa=isa))
        reference = ReferenceExecutor.load(checkpoint, engine, num_pages=2)
        for part in (sequence.part(0, rows), sequence.part(rows, rows + more_rows)):
            for difference in compare_step(native, reference, step_plan([part])):
                assert difference.bound_ratio <= 1, (isa, difference)
        result = native.run(step_plan([part]))
        bits.append((native.logits().copy().view(np.uint32), result.sampled.tokens))
        assert np.array_equal(result.sampled.tokens, native.logits().argmax(axis=1))
    for logits, tokens in bits[1:]:
        assert np.array_equal(logits, bits[0][0])
        assert np.array_equal(tokens, bits[0][1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize("rows", range(1, 10))
def test_a_row_has_the_same_bits_among_any_number_of_rows(isa: str, weights: str, rows: int) -> None:
    """Kernels take rows in blocks of up to 4 or 8: each remainder is another body."""
    checkpoint = tiny_checkpoint(tiny_config(hidden_size=72, intermediate_size=88, num_layers=1))
    executor = load(checkpoint, isa=isa, weights=weights)
    (sequence,) = random_sequences([9], checkpoint.config.vocab_size)
    expected = run_chunks(executor, sequence, 9).view(np.uint32)
    assert np.array_equal(run_chunks(executor, sequence, rows).view(np.uint32), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4G64", "Q4G64Z", "Q8G64Z", "Q8C"]
)
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 47])
def test_the_embedding_of_every_token_is_its_row(isa: str, kind: str, vocab: int) -> None:
    """Exact: a row of the packed matrix is read back with one multiplication and one addition."""
    checkpoint = tiny_checkpoint(tiny_config(vocab_size=vocab, num_layers=1, intermediate_size=64), kind)
    executor = load(checkpoint, isa=isa)
    (sequence,) = random_sequences([vocab], vocab)
    plan = replace(step_plan([sequence.part(0, vocab)]), tokens=np.arange(vocab, dtype=np.int32)[::-1].copy())
    executor.set_step(plan, np.zeros((vocab, 0), np.int32), np.zeros((vocab, 0), np.float32))
    executor.program.begin_step()
    executor.program.run_records(0, executor.lowered.made_by["x"] + 1)
    found = executor.program.buffer(executor.lowered.places["x"].buffer, vocab)[:, :64]
    values = as_f32(checkpoint, ["token_embd.weight"])["token_embd.weight"]
    assert np.array_equal(found, values[::-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["native", "int8"])
def test_the_ends_of_the_vocabulary(isa: str, weights: str) -> None:
    """Both as inputs and as the greedy choice, where the last tile is only partly used."""
    checkpoint = tiny_checkpoint(tiny_config(vocab_size=49, tie_embeddings=False, num_layers=1))
    head = np.zeros((49, 64), np.float32)
    values = as_f32(checkpoint, ["token_embd.weight", "output_norm.weight"])
    for token, sign in ((0, -1.0), (48, 1.0)):  # the head that points at what the final norm of any row may give
        head[token] = sign * values["output_norm.weight"][0]
    raw = checkpoint.tensors["output.weight"]
    tensors = checkpoint.tensors | {"output.weight": replace(raw, data=head.reshape(-1).view(np.uint8))}
    executor = load(replace(checkpoint, tensors=tensors), isa=isa, weights=weights)
    (sequence,) = random_sequences([40], 49)
    tokens = sequence.tokens.copy()
    tokens[:2] = 0, 48
    (logits,), (chosen,) = run_step(executor, [replace(sequence, tokens=tokens).part(0, 40)])
    assert np.array_equal(logits[:, 0], -logits[:, 48])
    assert not logits[:, 1:48].any()
    assert np.array_equal(chosen, np.where(logits[:, 0] > 0, 0, 48))
    assert len(set(chosen.tolist())) == 2


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_a_page_is_as_large_as_the_layout_says(kv_dtype: KVFormat, head_dim: int) -> None:
    config = tiny_config(head_dim=head_dim, rope=RopeConfig(10000.0, 16))
    executor = load(tiny_checkpoint(config), num_pages=3, kv_dtype=kv_dtype)
    assert executor.pages.shape == (3, KVLayout.of(config, kv_dtype).page_bytes)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_values_of_any_magnitude_are_stored_as_defined(isa: str, kv_dtype: KVFormat) -> None:
    """To the bit, the smallest and the largest, and what is not finite."""
    executor = load(tiny_checkpoint(tiny_config(num_layers=1)), isa=isa, kv_dtype=kv_dtype)
    magnitudes = [1.0, 0.0, 1e-45, 2.0**-126, 2.0**-120, 2.0**-119, 1e-30, 1e30, 3.3e38, np.nan, np.inf, -np.inf]
    (sequence,) = random_sequences([len(magnitudes)], 75)
    plan = step_plan([sequence.part(0, len(magnitudes))])
    executor.set_step(plan, np.zeros((len(magnitudes), 0), np.int32), np.zeros((len(magnitudes), 0), np.float32))
    executor.program.begin_step()
    made, place = executor.lowered.made_by, executor.lowered.places["blk.0.attn_v.weight"]
    computed = made["blk.0.attn_v.weight"] + 1
    executor.program.run_records(0, computed)
    model = executor.model
    value = executor.program.buffer(place.buffer, len(magnitudes))[:, place.column : place.column + model.kv_size]
    value[:] = np.random.default_rng(0).uniform(-1, 1, value.shape).astype(np.float32)
    value[:9] *= np.array(magnitudes[:9], np.float32)[:, None]
    value[:, 3] = magnitudes  # what is not finite, in one vector alone
    expected = KeyValues(value, value, kv_dtype).round(value.reshape(-1, model.num_kv_heads, model.head_dim))
    executor.program.run_records(computed, made["blk.0.q"] + 1)
    stored = pages_of(executor)[1][0, 0, :, : len(magnitudes)].swapaxes(0, 1)
    assert np.array_equal(stored, expected, equal_nan=True)
    assert np.isnan(stored[9]).any()
    assert not np.array_equal(stored[0], stored[8])


# ---- steps that would read or write outside ----


def refusals(plan: StepPlan) -> dict[str, StepPlan]:
    """Plans of two sequences of 3 and 2 rows, each with one thing wrong."""

    def ids(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(values, np.int32)

    return {
        "token outside the vocabulary (-1)": replace(plan, tokens=ids([1, 2, -1, 3, 4])),
        "token outside the vocabulary (75)": replace(plan, tokens=ids([1, 2, 3, 4, 75])),
        "position outside the context (-1)": replace(plan, positions=ids([-1, 0, 1, 0, 1])),
        "position outside the context (64)": replace(plan, positions=ids([62, 63, 64, 0, 1])),
        "positions of a sequence are consecutive": replace(plan, positions=ids([0, 1, 1, 0, 1])),
        "positions of a sequence are consecutive (gap)": replace(plan, positions=ids([0, 1, 3, 0, 1])),
        "page outside the pool (-1)": replace(plan, page_table=ids([0, -1]).reshape(2, 1)),
        "page outside the pool (4)": replace(plan, page_table=ids([4, 0]).reshape(2, 1)),
        "page table too short": replace(plan, positions=ids([30, 31, 32, 0, 1])),
        "page_table rows has length": replace(plan, page_table=ids([0]).reshape(1, 1)),
        "rows of the sequences (begin)": replace(plan, row_starts=ids([1, 3, 5])),
        "rows of the sequences (end)": replace(plan, row_starts=ids([0, 3, 4])),
        "rows of the sequences (past the end)": replace(plan, row_starts=ids([0, 3, 6])),
        "rows of a sequence": replace(plan, row_starts=ids([0, 3, 2, 5]), page_table=ids([0, 1, 2])[:, None]),
        "row_starts has a length below 2": replace(plan, row_starts=ids([0])),
        "row_starts has a length below 2 (nothing)": replace(plan, row_starts=ids([])),
        "number of rows": replace(plan, tokens=ids([]), positions=ids([]), row_starts=ids([0, 0, 0])),
        "number of rows (65)": step_plan([random_sequences([65], 75)[0].part(0, 65)], outputs=[0]),
        "logit row outside the step (-1)": replace(plan, logit_rows=ids([0, 1, 2, 3, -1])),
        "logit row outside the step (5)": replace(plan, logit_rows=ids([0, 1, 2, 3, 5])),
        "sample_rows bytes has length": replace(plan, logit_rows=ids([0])),
        "page copy outside the pool (-1)": replace(plan, page_copies=ids([0, -1]).reshape(1, 2)),
        "page copy onto itself": replace(plan, page_copies=ids([0, 1, 3, 3]).reshape(2, 2)),
        "page copy outside the pool (4)": replace(plan, page_copies=ids([4, 0]).reshape(1, 2)),
    }


def two_sequences() -> StepPlan:
    a, b = random_sequences([3, 2], 75)
    return step_plan([a.part(0, 3), b.part(0, 2)])


@pytest.mark.parametrize("problem", refusals(two_sequences()))
def test_a_step_outside_its_memory_is_refused_by_name(problem: str) -> None:
    """And the executor goes on as if it had not been asked."""
    checkpoint = tiny_checkpoint(tiny_config(context_length=64))
    executor = load(checkpoint)
    before = two_sequences()  # holds the step's arrays, which the program goes on naming
    executor.run(before)
    expected, pages = executor.logits().copy(), executor.program.kv().copy()
    with pytest.raises(ValueError, match=problem.split(" (")[0]):
        executor.run(refusals(two_sequences())[problem])
    assert np.array_equal(executor.program.kv(), pages)
    executor.logits()[:] = 0
    executor.program.run()  # the step that it was given last
    assert np.array_equal(executor.logits(), expected)
    executor.run(two_sequences())
    assert np.array_equal(executor.logits(), expected)


@pytest.mark.parametrize(("position", "is_allowed"), [(63, True), (64, False)])
def test_the_last_position_of_the_context(position: int, is_allowed: bool) -> None:
    checkpoint = tiny_checkpoint(tiny_config(context_length=64))
    executor = load(checkpoint)
    sequence = random_sequences([96], 75)[0]
    run_step(executor, [sequence.part(0, 62)])
    if is_allowed:
        run_step(executor, [sequence.part(position, position + 1)])
    else:
        with pytest.raises(ValueError, match="position outside the context"):
            run_step(executor, [sequence.part(position, position + 1)])


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    with pytest.raises(ParameterError, match="this processor runs scalar"):
        load(checkpoint, isa="neon")
    assert ISAS[0] == "scalar"
    assert _native.best_isa() == ISAS[-1]


@pytest.mark.parametrize("isa", ISAS)
def test_the_instruction_set_asked_for_is_the_one_that_runs(isa: str) -> None:
    path = load(tiny_checkpoint(tiny_config()), isa=isa, num_threads=3).path()
    assert (path["isa"], path["threads"]) == (isa, 3)


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_the_kv_format_named_is_the_one_that_runs(kv_dtype: KVFormat) -> None:
    executor = load(tiny_checkpoint(tiny_config()), kv_dtype=kv_dtype)
    executor._config = EngineConfig()  # what was asked for is not what is told
    assert executor.path()["kv_dtype"] == kv_dtype


@pytest.mark.parametrize("field", ["positions", "page_copies", "count_values", "bias_values"])
def test_arrays_of_a_step_have_the_lengths_that_go_together(field: str) -> None:
    plan, none = two_sequences(), np.zeros(0, np.int32)
    rows = plan.samples.rows.copy()
    rows["counts_len"] = rows["bias_len"] = 4
    rows["presence_penalty"] = 1
    ids = np.arange(4, dtype=np.int32)
    lists = {"count_tokens": ids, "count_values": ids, "bias_tokens": ids, "bias_values": ids.astype(np.float32)}
    changes = {
        "positions": {"positions": np.array([0, 1, 2, 0], np.int32)},
        "page_copies": {"page_copies": np.zeros((1, 3), np.int32)},
        "count_values": {"samples": replace(plan.samples, rows=rows, **lists | {"count_values": none})},
        "bias_values": {
            "samples": replace(plan.samples, rows=rows, **lists | {"bias_values": none.astype(np.float32)})
        },
    }[field]
    executor = load(tiny_checkpoint(tiny_config(context_length=64)))
    with pytest.raises(ValueError, match=r"length|row"):
        executor.run(replace(plan, **changes))
