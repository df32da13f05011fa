"""The graph of an EAGLE head and the hidden states of a target: the native executor against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_heads import tiny_head
from tiny_models import MemoryCheckpoint, changed, tiny_checkpoint, tiny_config
from token_sequences import Part, TokenSequence, engine_config, random_sequences, step_plan

from paceline import _native
from paceline.config import ModelConfig
from paceline.executors.base import Executor, StepPlan
from paceline.executors.compare import compare_step
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.sampling.draw import sample_reference
from paceline.sampling.rows import greedy_rows

ISAS = _native.isas()
NUM_PAGES = 16
Floats = NDArray[np.float32]


def features_of(parts: Sequence[Part], width: int) -> Floats:
    """Random features, the same for a token of a sequence in whatever step, some channels a hundred times larger."""
    rows = []
    for part in parts:
        rng = np.random.default_rng((7, int(part.sequence.pages[0])))
        all_rows = rng.standard_normal((len(part.sequence.tokens), width)).astype(np.float32)
        all_rows[:, ::17] *= 100
        rows.append(all_rows[part.begin : part.end])
    return np.concatenate(rows)


def head_plan(parts: Sequence[Part], width: int, outputs: Sequence[int] | None = None) -> StepPlan:
    return replace(step_plan(parts, outputs=outputs), features=features_of(parts, width))


def steps(model: ModelConfig) -> list[StepPlan]:
    """A prompt, a second one that joins, and decodes of both."""
    a, b = random_sequences([150, 40], model.vocab_size)
    parts: list[tuple[list[Part], list[int] | None]] = [
        ([a.part(0, 37)], None),
        ([a.part(37, 130), b.part(0, 3)], [92, 95]),
        ([b.part(3, 4), a.part(130, 131)], None),
        ([a.part(131, 132)], None),
    ]
    return [head_plan(some, model.hidden_size, outputs) for some, outputs in parts]


def executors(
    native: MemoryCheckpoint, reference: MemoryCheckpoint, **config: Any
) -> tuple[NativeExecutor, ReferenceExecutor]:
    engine = engine_config(native.config, num_pages=NUM_PAGES, rows=160, **config)
    plain = ReferenceExecutor.load(reference, replace(engine, isa=None), num_pages=NUM_PAGES)
    return NativeExecutor.load(native, engine), plain


def wrong_values(native: NativeExecutor, reference: ReferenceExecutor, plans: Sequence[StepPlan]) -> list[str]:
    """Names of the values that differ, in the order in which they are made."""
    found = [difference for plan in plans for difference in compare_step(native, reference, plan)]
    assert len(found) > 8 * len(plans)
    return [difference.value for difference in found if not difference.bound_ratio <= 1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize("norms", [False, True])
def test_node_by_node(isa: str, weights: str, norms: bool) -> None:
    checkpoint = tiny_checkpoint(tiny_head(input_norms=norms))
    native, reference = executors(checkpoint, checkpoint, isa=isa, weights=weights, num_threads=2)
    assert not wrong_values(native, reference, steps(checkpoint.config))


def test_a_matrix_of_another_kind() -> None:
    """The sum of a float and an integer product, either way round."""
    for kinds in ({"fc_embed.weight": "Q8_0"}, {"fc_feature.weight": "Q8_0"}):
        checkpoint = tiny_checkpoint(tiny_head(), kinds=kinds)
        assert not wrong_values(*executors(checkpoint, checkpoint), steps(checkpoint.config))


@pytest.mark.parametrize(
    ("weight", "first_wrong"),
    [
        ("fc_embed.weight", "fc_embed.weight"),
        ("fc_feature.weight", "fc_feature.weight.residual"),
        ("embed_norm.weight", "embed_norm.weight"),
        ("feature_norm.weight", "feature_norm.weight"),
        ("output.weight", "output.weight"),
    ],
)
def test_a_wrong_weight_is_found(weight: str, first_wrong: str) -> None:
    checkpoint = tiny_checkpoint(tiny_head())
    wrong = changed(checkpoint, weight, 2, 0xFF)  # a large part of the fraction of the first number
    names = wrong_values(*executors(wrong, checkpoint), steps(checkpoint.config))
    assert names[0] == first_wrong


def test_wrong_features_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint(tiny_head())
    native, reference = executors(checkpoint, checkpoint)
    set_features = native._set_features

    def off_by_one_bit(plan: StepPlan) -> None:
        set_features(plan)
        value = native.program.buffer(native.lowered.features_buffer, 3)
        value[2, 5] = np.nextafter(value[2, 5], np.float32(np.inf))

    monkeypatch.setattr(native, "_set_features", off_by_one_bit)
    assert wrong_values(native, reference, steps(checkpoint.config)[:1]) == ["features"]


def test_features_are_asked_for() -> None:
    head, target = tiny_checkpoint(tiny_head()), tiny_checkpoint(tiny_config())
    parts = [random_sequences([5], 75)[0].part(0, 5)]
    plan = head_plan(parts, 64)
    assert plan.features is not None
    for executor in executors(head, head):
        for wrong in (None, plan.features[:4], plan.features[:, :63]):
            with pytest.raises(AssertionError, match="features"):
                executor.run(replace(plan, features=wrong))
        executor.run(plan)
    with pytest.raises(AssertionError, match="features"):
        executors(target, target)[0].run(plan)


def test_a_trimmed_head_chooses_its_own_tokens() -> None:
    """It reads tokens beyond those that it knows, and reports as many as it has."""
    checkpoint = tiny_checkpoint(tiny_head(draft_vocab_size=9))
    sequence = TokenSequence(np.full(5, 74, np.int32), np.arange(1, dtype=np.int32))
    samples = greedy_rows(5)
    samples.rows["num_logprobs"] = 9
    plan = replace(head_plan([sequence.part(0, 5)], 64), samples=samples)
    native, reference = executors(checkpoint, checkpoint)
    sampled, by_definition = native.run(plan).sampled, reference.run(plan).sampled
    logits = native.logits()
    assert logits.shape == (5, 9)
    expected = sample_reference(logits.copy(), samples)
    assert np.array_equal(sampled.tokens, logits.argmax(axis=1))
    assert np.array_equal(sampled.top_tokens, expected.top_tokens)
    assert np.allclose(sampled.top_logprobs, expected.top_logprobs, atol=1e-5)
    assert np.array_equal(by_definition.top_tokens, expected.top_tokens)
    for executor in (native, reference):
        p = executor.probabilities(samples, range(5))
        assert p.shape == (5, 9)
        assert np.array_equal(p.argmax(axis=1), sampled.tokens)


def test_logits_have_room() -> None:
    program = _native.Program("scalar", 1, 1, 1, 8, 1, 32, 1, 1, 16, 1, "f16", None, 33)
    with pytest.raises(Exception, match="a logit for every token"):
        program.sample(program.add_buffer(32, outputs=True))
    program.sample(program.add_buffer(33, outputs=True))


# Hidden states


def hidden_in_chunks(
    executor: Executor, sequence: TokenSequence, chunk: int, *, is_head: bool
) -> tuple[Floats, Floats]:
    """Hidden states [tokens, hidden] of one sequence alone, and its logits, ``chunk`` tokens a step."""
    hidden, logits = [], []
    for begin in range(0, len(sequence.tokens), chunk):
        parts = [sequence.part(begin, min(begin + chunk, len(sequence.tokens)))]
        executor.run(head_plan(parts, executor.model.hidden_size) if is_head else step_plan(parts))
        hidden.append(executor.hidden().copy())
        logits.append(executor.logits().copy())
    return np.concatenate(hidden), np.concatenate(logits)


@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
def test_hidden_states_have_the_same_bits_on_every_path(weights: str, is_head: bool) -> None:
    checkpoint = tiny_checkpoint(tiny_head() if is_head else tiny_config())
    sequence = random_sequences([150], 75)[0]

    def load(isa: str, threads: int) -> NativeExecutor:
        config = {"isa": isa, "num_threads": threads, "weights": weights}
        return NativeExecutor.load(
            checkpoint, engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=160, **config)
        )

    expected = hidden_in_chunks(load("scalar", 1), sequence, 150, is_head=is_head)
    assert expected[0].shape == (150, 64)
    assert np.abs(np.diff(expected[0], axis=0)).max(axis=1).min() > 0  # no two rows are alike
    for isa in ISAS:
        for threads, chunk in ((1, 150), (2, 37), (1, 1)):
            found = hidden_in_chunks(load(isa, threads), sequence, chunk, is_head=is_head)
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(one.view(np.uint32), other.view(np.uint32)), (isa, threads, chunk)


@pytest.mark.parametrize("is_head", [False, True])
def test_hidden_states_are_what_the_head_reads(is_head: bool) -> None:
    """Of all rows, those without logits too: norm and head make the logits of them. Floats, so that nothing rounds."""
    checkpoint = tiny_checkpoint(tiny_head() if is_head else tiny_config())
    native, reference = executors(checkpoint, checkpoint, kv_dtype="f32")
    parts = [random_sequences([30], 75)[0].part(0, 30)]
    plan = head_plan(parts, 64, [29]) if is_head else step_plan(parts, outputs=[29])
    for executor in (native, reference):
        executor.run(plan)
    assert native.hidden().shape == reference.hidden().shape == (30, 64)
    assert np.allclose(native.hidden(), reference.hidden(), rtol=1e-4, atol=1e-4)
    all_logits = replace(plan, logit_rows=np.arange(30, dtype=np.int32), samples=greedy_rows(30))
    hidden = native.hidden().copy()
    native.run(all_logits)
    norm, head = (
        checkpoint.tensors[name].data.view(np.float32)
        for name in ("output_norm.weight", "output.weight" if is_head else "token_embd.weight")
    )
    normed = hidden / np.sqrt((hidden.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * norm
    assert np.allclose(native.logits(), normed @ head.reshape(-1, 64).T, rtol=1e-3, atol=1e-3)
    assert not np.allclose(native.logits()[1:], (normed @ head.reshape(-1, 64).T)[:-1], rtol=1e-3, atol=1e-3)


def test_a_view_not_a_copy() -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    native, _ = executors(checkpoint, checkpoint)
    a, b = random_sequences([3, 2], 75)
    native.run(step_plan([a.part(0, 3)]))
    before = native.hidden()
    kept = before.copy()
    native.run(step_plan([b.part(0, 2)]))
    assert native.hidden().shape == (2, 64)
    assert np.array_equal(before[:2], native.hidden())
    assert not np.array_equal(before[:2], kept[:2])
