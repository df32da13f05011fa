"""Distributions of outputs on every instruction set of this machine, against the numpy definition and against draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sampling_cases import COMBINATIONS, decision_margin, language_model_like, mixed_rows, sample_native
from test_sampling_distribution import one_row
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, step_plan

from paceline import _native
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.measure.trace import TracingExecutor
from paceline.sampling.distribution import NoTokenError, kept, probabilities, transform
from paceline.sampling.rows import BAD_TOKEN, NOT_FINITE, NOTHING_LEFT, SampleRows

every_isa = pytest.mark.parametrize("isa", _native.isas())
NOTHING = np.zeros(0, np.int32)
P = NDArray[np.float64]


def distributions(
    isa: str,
    logits: NDArray[np.float32],
    samples: SampleRows,
    *,
    threads: int = 1,
    outputs: Sequence[int] | None = None,
) -> tuple[P, NDArray[np.uint32]]:
    """p and status of outputs, all by default, of a step whose logits [outputs, vocab] these are."""
    count, vocab = logits.shape
    program = _native.Program(isa, threads, 1, count, vocab, 1, 32, 1, 1, 16, 1, "f16")
    buffer = program.add_buffer(vocab, outputs=True)
    rows = np.ascontiguousarray(samples.rows).view(np.uint8).reshape(-1)
    lists = (samples.count_tokens, samples.count_values, samples.bias_tokens, samples.bias_values)
    zeros, pairs = np.zeros(1, np.int32), np.zeros((0, 2), np.int32)
    width = max(0, int(samples.rows["num_logprobs"].max()))
    tops = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    program.set_step(
        zeros, zeros, np.array([0, 1], np.int32), zeros[:, None], np.zeros(count, np.int32), pairs, pairs, rows, *lists,
        samples.banned_tokens, samples.mask_words, *tops,
    )  # fmt: skip
    program.buffer(buffer, count)[:, :vocab] = logits
    wanted = np.arange(count, dtype=np.int32) if outputs is None else np.array(outputs, np.int32)
    p, status = np.full((len(wanted), vocab), np.nan), np.full(len(wanted), 99, np.uint32)
    program.distributions(buffer, wanted, rows, *lists, samples.banned_tokens, samples.mask_words, p, status)
    return p, status


def assert_right(p: P, logits: NDArray[np.float32], row: np.void, lists: SampleRows) -> None:
    """Raises AssertionError unless p is the distribution of the definition: the same tokens, within the bound of
    csrc/kernels/distribution-inl.h.
    """
    z = transform(logits, row, lists)
    expected = probabilities(logits, row, lists)
    if row["temperature"] == 0:
        assert np.array_equal(p, expected)
        return
    keep = kept(z, row)
    depth = np.where(keep, np.float64(z.max()) - z, 0.0)
    assert not p[~keep].any()
    assert (p[keep & (depth < 87)] > 0).all()
    weight_error = (depth + 4) * 2.0**-24
    bound = 1.001 * expected * (weight_error + (expected * weight_error).sum() + 2.0**-24) + 2.0**-125
    assert (np.abs(p - expected) <= bound).all()


@every_isa
@pytest.mark.parametrize("case", COMBINATIONS, ids=str)
def test_every_vocabulary_size(isa: str, case: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    for size in [*range(1, 71), 127, 129, 1023, 1024, 1025, 3000]:
        if size == 1 and case.get("banned"):
            continue
        for scale in (3.0, 0.1):
            logits = (rng.standard_normal((1, size)) * scale).astype(np.float32)
            samples = one_row(seed=size, position=3, **case)
            (p,), (status,) = distributions(isa, logits, samples)
            assert status == 0
            assert_right(p, logits[0], samples.rows[0], samples)


@every_isa
def test_a_real_vocabulary(isa: str) -> None:
    """49,152 tokens: few kept, thousands, all; ties beyond what a filter needs."""
    rng = np.random.default_rng(11)
    for case in (
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_k": 20_000, "min_p": 1e-4},
        {"temperature": 1.0, "min_p": 0.01, "bias": {5: 3.0}, "banned": list(range(100, 40_000))},
        {"temperature": 0.05},  # weights down to 0
    ):
        samples = one_row(**case)
        for logits in (language_model_like(rng, 49_152), rng.integers(0, 4, 49_152).astype(np.float32)):
            if "top_p" in case and decision_margin(logits[None], samples, 0) <= 1:
                continue  # what is kept at the edge is undecidable in float32
            (p,), _ = distributions(isa, logits[None], samples)
            assert_right(p, logits, samples.rows[0], samples)


@every_isa
def test_mixed_rows(isa: str) -> None:
    rng = np.random.default_rng(5)
    checked = 0
    for size in (37, 300, 5001):
        logits = (rng.standard_normal((60, size)) * 3).astype(np.float32)
        samples = mixed_rows(rng, 60)
        p, status = distributions(isa, logits, samples, threads=2)
        assert not status.any()
        for i, row in enumerate(samples.rows):
            if decision_margin(logits, samples, i) > 1 or row["top_p"] == 1:
                assert_right(p[i], logits[i], row, samples)
                checked += 1
    assert checked > 100


@every_isa
def test_what_is_drawn_is_what_has_a_probability(isa: str) -> None:
    """The kept set is that of the draw itself, not another one that is nearly the same."""
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((1, 200)) * 2).astype(np.float32)
    for case in ({"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.6, "min_p": 0.1}):
        samples = one_row(seed=1, temperature=1.0, **case)
        (p,), _ = distributions(isa, logits, samples)
        rows = np.repeat(samples.rows, 4000)
        rows["position"] = np.arange(4000)
        drawn, _ = sample_native(isa, np.repeat(logits, 4000, axis=0), SampleRows(rows))
        counts = np.bincount(drawn.tokens, minlength=200)
        assert set(np.flatnonzero(counts)) == set(np.flatnonzero(p))
        # Each count is binomial: five standard deviations and one count.
        assert (np.abs(counts - 4000 * p) <= 5 * np.sqrt(4000 * p * (1 - p)) + 1).all()


@every_isa
def test_the_edge_of_top_p_is_that_of_the_draw(isa: str) -> None:
    """Equal logits put the edge where float32 masses decide; whatever they decide, both agree."""
    for size in (3, 10, 49):
        logits = np.zeros((1, size), np.float32)
        for tenths in range(1, 10):
            samples = one_row(seed=9, temperature=1.0, top_p=tenths / 10)
            (p,), _ = distributions(isa, logits, samples)
            rows = np.repeat(samples.rows, 2000)
            rows["position"] = np.arange(2000)
            drawn, _ = sample_native(isa, np.repeat(logits, 2000, axis=0), SampleRows(rows))
            assert set(drawn.tokens.tolist()) == set(np.flatnonzero(p).tolist())


@every_isa
def test_a_forced_token_is_ignored(isa: str) -> None:
    logits = np.array([[0, 3, 1]], np.float32)
    for case in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "banned": [1]}):
        free, forced = (distributions(isa, logits, one_row(forced=token, **case))[0] for token in (-1, 0))
        assert np.array_equal(free, forced)
        assert free[0].sum() == pytest.approx(1, abs=1e-12)


@every_isa
def test_failures_are_statuses_and_leave_other_outputs_alone(isa: str) -> None:
    logits = np.zeros((2, 70), np.float32)
    good, _ = distributions(isa, logits, SampleRows(np.repeat(one_row(temperature=1.0).rows, 2)))
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, 33, 69):
            wrong = logits.copy()
            wrong[0, at] = bad
            for temperature in (0.0, 1.0):
                rows = np.repeat(one_row(temperature=temperature).rows, 2)
                p, status = distributions(isa, wrong, SampleRows(rows))
                assert status.tolist() == [NOT_FINITE, 0]
                assert not p[0].any()
                assert temperature == 0 or np.array_equal(p[1], good[1])
    for case, expected in (
        ({"banned": list(range(70))}, NOTHING_LEFT),
        ({"banned": [70]}, BAD_TOKEN),
        ({"counts": {-1: 1}}, BAD_TOKEN),
        ({"bias": {2**30: 1.0}}, BAD_TOKEN),
    ):
        for temperature in (0.0, 1.0):
            p, status = distributions(isa, logits[:1], one_row(temperature=temperature, **case))
            assert status.tolist() == [expected]
            assert not p.any()


def test_same_bits_on_every_instruction_set_and_any_threads_and_order() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 37, 300, 5001):
        logits = (rng.standard_normal((30, size)) * 3).astype(np.float32)
        samples = mixed_rows(rng, 30)
        first, status = distributions("scalar", logits, samples)
        for isa in _native.isas():
            for threads in (1, 2, 3):
                p, other = distributions(isa, logits, samples, threads=threads)
                assert p.tobytes() == first.tobytes()
                assert np.array_equal(other, status)
        order = [29, 3, 3, 0]
        p, other = distributions("scalar", logits, samples, threads=2, outputs=order)
        assert p.tobytes() == first[order].tobytes()
        assert np.array_equal(other, status[order])


def test_the_comparison_sees_what_is_wrong() -> None:
    logits = (np.random.default_rng(4).standard_normal(300) * 3).astype(np.float32)
    samples = one_row(temperature=0.8, top_k=40)
    row = samples.rows[0]
    (right,), _ = distributions("scalar", logits[None], samples)
    assert_right(right, logits, row, samples)
    least = int(np.argmin(np.where(right > 0, right, 1)))
    one_less, one_more = right.copy(), right.copy()
    one_less[least] = 0
    one_more[int(np.argmin(right))] = 1e-30
    moved = right.copy()
    moved[np.argsort(right)[-2:]] += [-1e-6, 1e-6]
    other = probabilities(logits, one_row(temperature=0.80001, top_k=40).rows[0], samples)
    for wrong in (one_less, one_more, moved, right * (1 + 1e-5), other):
        with pytest.raises(AssertionError):
            assert_right(wrong, logits, row, samples)


def test_executors_give_the_distributions_of_their_last_step() -> None:
    checkpoint = tiny_checkpoint(tiny_config(), "Q4_1")
    engine = engine_config(checkpoint.config, num_pages=4, rows=16, num_threads=2)
    native = NativeExecutor.load(checkpoint, engine)
    plain = ReferenceExecutor.load(checkpoint, engine, num_pages=4)
    (sequence,) = random_sequences([6], checkpoint.config.vocab_size)
    for executor in (native, plain, TracingExecutor(native), TracingExecutor(plain)):
        executor.run(step_plan([sequence.part(0, 6)], outputs=[1, 4, 5]))
        rows = np.repeat(one_row(temperature=0.9, top_k=9).rows, 3)
        samples = replace(one_row(banned=[2, 80]), rows=rows)
        rows["banned_len"] = [1, 0, 2]
        p = executor.probabilities(samples, [1, 0])
        assert p.shape == (2, 75)
        for found, output in zip(p, (1, 0), strict=True):
            assert_right(found, executor.logits()[output], rows[output], samples)
        assert not p[1, 2]
        assert executor.probabilities(samples, []).shape == (0, 75)
        with pytest.raises(NoTokenError) as error:
            executor.probabilities(samples, [0, 2])
        assert error.value.status == BAD_TOKEN
    for output in (-1, 3):
        with pytest.raises(ValueError, match="no output"):
            native.probabilities(samples, [output])
    with pytest.raises(ValueError, match="sample_rows"):
        native.probabilities(SampleRows(rows[:2]), [0])
