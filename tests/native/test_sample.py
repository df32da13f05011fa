"""The sampling kernel on every instruction set of this machine, against the numpy definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling_cases import COMBINATIONS, decision_margin, language_model_like, mixed_rows, sample_native
from test_sampling_distribution import one_row
from test_sampling_draw import LOGITS, chi_square_excess, sampled_rows

from paceline import _native
from paceline.sampling.distribution import probabilities
from paceline.sampling.draw import sample_reference
from paceline.sampling.rows import SAMPLE_ROW, SampledRows, SampleRows, greedy_rows

OK, NOT_FINITE, NOTHING_LEFT, BAD_TOKEN = range(4)
RESULT_FIELDS = ("tokens", "logprobs", "top_tokens", "top_logprobs")


def runs_here(isa: str) -> bool:
    try:
        sample_native(isa, np.zeros((1, 1), np.float32), greedy_rows(1))
    except ValueError:
        return False
    return True


ISAS = [isa for isa in ("scalar", "avx2", "avx2_vnni", "avx512_vnni") if runs_here(isa)]
every_isa = pytest.mark.parametrize("isa", ISAS)


def logprob_bound(logits: NDArray[np.float32], logprobs: NDArray[np.floating]) -> NDArray[np.float64]:
    """Largest error of a reported log-probability.

    The sum of exponentials adds 16 terms a register, 2 levels of registers, one partial sum a 1,024 logits and 4 levels
    of lanes, each rounding by 2^-24 of the sum; an exponential is good to 2 ulp = 4 * 2^-24, and its argument, at most
    about 16 where it matters, is rounded by 16 * 2^-24. The logarithm of a relative error is that error; the result is
    rounded once.
    """
    roundings = 16 + 2 + logits.shape[-1] / 1024 + 4 + 4 + 16
    return (roundings + np.abs(logprobs)) * 2.0**-24


def check(isa: str, logits: NDArray[np.float32], samples: SampleRows) -> SampledRows:
    """Kernel and definition agree: tokens and alternatives exactly, log-probabilities within their bound."""
    expected = sample_reference(logits, samples)
    got, status = sample_native(isa, logits, samples)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.top_tokens, expected.top_tokens)
    np.testing.assert_array_equal(status == OK, expected.tokens >= 0)
    for name in ("logprobs", "top_logprobs"):
        a, b = getattr(got, name).astype(np.float64), getattr(expected, name).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert np.all((np.abs(a - b) <= logprob_bound(logits, b)) | np.isnan(b)), np.nanmax(np.abs(a - b))
    return got


def test_the_record_has_the_same_layout_on_both_sides() -> None:
    layout = _native.sample_row_layout()
    assert layout.pop("size") == SAMPLE_ROW.itemsize
    assert SAMPLE_ROW.fields is not None
    assert layout == {name: field[1] for name, field in SAMPLE_ROW.fields.items()}


def test_unknown_instruction_sets_are_refused() -> None:
    assert "scalar" in ISAS
    with pytest.raises(ValueError, match="instruction set"):
        sample_native("sse9", np.zeros((1, 4), np.float32), greedy_rows(1))


@every_isa
@pytest.mark.parametrize("case", COMBINATIONS, ids=str)
def test_every_vocabulary_size(isa: str, case: dict[str, Any]) -> None:
    """Sizes 1..70 and around the blocks of 64 and 1,024; this seed leaves no undecidable choice, which is asserted."""
    rng = np.random.default_rng(7)
    for size in [*range(1, 71), 127, 129, 1023, 1024, 1025, 3000]:
        if size == 1 and case.get("banned"):
            continue
        for scale in (3.0, 0.1):
            logits = (rng.standard_normal((1, size)) * scale).astype(np.float32)
            samples = one_row(seed=size, position=3, **case)
            assert decision_margin(logits, samples, 0) > 1, size
            check(isa, logits, samples)


@every_isa
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_combinations(isa: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 200))
    token = st.integers(0, size - 1)
    number = st.one_of(st.integers(-8, 8).map(float), st.floats(-30, 30, width=32))
    if data.draw(st.booleans()):
        values = data.draw(st.lists(number, min_size=size, max_size=size))
    else:
        values = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-5, 5, size).tolist()
    logits = np.array([values], np.float32)
    samples = one_row(
        seed=data.draw(st.integers(0, 2**64 - 1)),
        position=data.draw(st.integers(0, 2**32 - 1)),
        temperature=data.draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0])),
        top_k=data.draw(st.integers(0, size + 1)),
        top_p=data.draw(st.sampled_from([1.0, 0.95, 0.5, 0.1])),
        min_p=data.draw(st.sampled_from([0.0, 0.02, 0.3])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.3])),
        num_logprobs=data.draw(st.integers(-1, 64)),
        counts=data.draw(st.dictionaries(token, st.integers(0, 5), max_size=8)),
        bias=data.draw(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=8)),
        banned=data.draw(st.lists(token, max_size=size, unique=True)),
        allowed=data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=size, max_size=size))),
    )
    assume(decision_margin(logits, samples, 0) > 1)
    check(isa, logits, samples)


@every_isa
@pytest.mark.parametrize("kind", ["peaked", "broad", "ties"])
def test_real_vocabulary(isa: str, kind: str) -> None:
    """49,152 tokens: filters that keep few, thousands and nearly all; more equal logits than any of them needs."""
    rng = np.random.default_rng(11)
    size = 49_152
    cases: list[dict[str, Any]] = [
        {"num_logprobs": 64},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_k": 767},
        {"temperature": 1.0, "top_k": 20_000, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.01, "bias": {5: 3.0}, "banned": list(range(100, 40_000)), "num_logprobs": 2},
    ]
    for case in cases:
        if kind == "peaked":
            logits = language_model_like(rng, size)[None]
        elif kind == "broad":
            logits = rng.standard_normal((1, size)).astype(np.float32)
        else:
            logits = rng.integers(0, 4, (1, size)).astype(np.float32)
        samples = one_row(seed=21, position=9, **case)
        # A broad distribution has 50,000 masses a few 1e-5 apart: whether a token at the edge is kept cannot be decided
        # there, and the draw differs only if just that token wins.
        if "top_p" not in case:
            assert decision_margin(logits, samples, 0) > 1
        check(isa, logits, samples)


@every_isa
def test_extreme_logits(isa: str) -> None:
    tiny = np.float32(1.4e-45)
    for values in (
        [0, tiny, 3 * tiny, 2 * tiny] * 20,
        [-0.0, 0.0] * 40,
        [3e38, -3e38] * 40,
        [1e7, 1e7 - 1, 1e7 - 2, 0] * 20,
        (2.0 ** np.arange(-120, 100)).tolist(),
        (-(2.0 ** np.arange(-120, 100))).tolist(),
    ):
        logits = np.array([values], np.float32)
        for fields in ({"num_logprobs": 30}, {"temperature": 1.0, "top_k": 25}, {"temperature": 1.0, "top_p": 0.3717}):
            samples = one_row(seed=4, position=1, **fields)
            # Noise vanishes beside 3e38: every score is a tie, exactly, on both sides.
            assert abs(values[0]) == 3e38 or decision_margin(logits, samples, 0) > 1
            expected, (got, _) = sample_reference(logits, samples), sample_native(isa, logits, samples)
            np.testing.assert_array_equal(got.tokens, expected.tokens)
            np.testing.assert_array_equal(got.top_tokens, expected.top_tokens)


@every_isa
def test_greedy_ties_go_to_the_lower_id(isa: str) -> None:
    for size in (1, 2, 16, 17, 64, 65, 1025, 5000):
        for position in {0, size // 2, size - 1}:
            logits = np.zeros((1, size), np.float32)
            assert sample_native(isa, logits, greedy_rows(1))[0].tokens[0] == 0
            logits[0, position:] = 1
            assert sample_native(isa, logits, greedy_rows(1))[0].tokens[0] == position


@every_isa
def test_all_but_one_banned(isa: str) -> None:
    for size, left in ((3, 1), (70, 69), (5000, 0), (5000, 4321)):
        banned = [token for token in range(size) if token != left]
        for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.9}):
            samples = one_row(banned=banned, num_logprobs=1, **fields)
            got = check(isa, np.random.default_rng(size).standard_normal((1, size)).astype(np.float32), samples)
            assert got.tokens[0] == left


@every_isa
def test_masks_of_every_size(isa: str) -> None:
    """Words that allow all, none or some of their tokens; a vocabulary that ends inside a word, with its spare bits
    set."""
    rng = np.random.default_rng(3)
    for size in [*range(1, 70), 127, 129, 1025, 3000]:
        words = rng.integers(0, 2**32, (3, -(-size // 32)), np.uint32)
        words[:, rng.random(words.shape[1]) < 0.4] = 0
        words[:, rng.random(words.shape[1]) < 0.3] = 2**32 - 1
        words[1, 0] |= 1
        logits = rng.standard_normal((1, size)).astype(np.float32)
        for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "num_logprobs": 2}):
            samples = replace(one_row(seed=size, mask=1, **fields), mask_words=words)
            assert decision_margin(logits, samples, 0) > 1, size
            got = check(isa, logits, samples)
            token = int(got.tokens[0])
            assert words[1, token // 32] >> np.uint32(token % 32) & 1
            assert got.tokens[0] == check(isa, logits, replace(samples, mask_words=words[1:2].repeat(3, 0))).tokens[0]


@every_isa
def test_a_wrong_mask_would_be_seen(isa: str) -> None:
    logits = np.arange(64, dtype=np.float32)[None]
    right = one_row(allowed=[token < 40 for token in range(64)])
    wrong = one_row(allowed=[token < 39 for token in range(64)])
    assert sample_native(isa, logits, right)[0].tokens[0] == 39
    assert sample_native(isa, logits, wrong)[0].tokens[0] == 38
    with pytest.raises(ValueError, match="one bit for each token"):
        sample_native(isa, logits[:, :32], right)


@every_isa
def test_failures_are_reported_and_leave_other_rows_alone(isa: str) -> None:
    for size in (1, 15, 64, 100, 2000):
        for bad in (np.nan, np.inf, -np.inf):
            for at in {0, size // 2, size - 1}:
                for fields in ({}, {"temperature": 1.0}, {"forced": 0}, {"bias": {0: 1.0}}):
                    logits = np.zeros((2, size), np.float32)
                    logits[0, at] = bad
                    samples = one_row(num_logprobs=1, **fields)
                    got, status = sample_native(
                        isa, logits, SampleRows(np.repeat(samples.rows, 2), **lists_of(samples))
                    )
                    assert status.tolist() == [NOT_FINITE, OK]
                    assert [got.tokens[0], got.top_tokens[0, 0], np.isnan(got.logprobs[0])] == [-1, -1, True]
                    assert got.tokens[1] >= 0
    logits = np.zeros((1, 3), np.float32)
    wrong: list[tuple[SampleRows, int]] = [
        (one_row(banned=[0, 1, 2]), NOTHING_LEFT),
        (one_row(banned=[0, 1, 2], temperature=1.0), NOTHING_LEFT),
        (one_row(banned=[3]), BAD_TOKEN),
        (one_row(counts={-1: 1}), BAD_TOKEN),
        (one_row(bias={2**30: 1.0}), BAD_TOKEN),
        (one_row(forced=3), BAD_TOKEN),
        (one_row(allowed=[False] * 3), NOTHING_LEFT),
        (one_row(allowed=[False] * 3, temperature=1.0), NOTHING_LEFT),
        (one_row(allowed=[True, False, False], banned=[0]), NOTHING_LEFT),
        (one_row(mask=0), BAD_TOKEN),
        (replace(one_row(allowed=[True] * 3), rows=one_row(mask=2).rows), BAD_TOKEN),
    ]
    for field in ("counts", "bias", "banned"):
        for start, length in ((-1, 1), (0, 2), (2, 0), (0, -1), (2**31 - 1, 1), (0, 2**31 - 1)):
            samples = one_row()
            samples.rows[f"{field}_start"], samples.rows[f"{field}_len"] = start, length
            wrong.append((samples, BAD_TOKEN if length else OK))
    for samples, expected in wrong:
        got, status = sample_native(isa, logits, samples)
        assert status[0] == expected
        assert (got.tokens[0] == -1) == (expected != OK)


def lists_of(samples: SampleRows) -> dict[str, Any]:
    names = ("count_tokens", "count_values", "bias_tokens", "bias_values", "banned_tokens")
    return {name: getattr(samples, name) for name in names}


def test_every_instruction_set_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 37, 300, 5001):
        count = 60
        logits = (rng.standard_normal((count, size)) * 3).astype(np.float32)
        samples = mixed_rows(rng, count)
        first, _ = sample_native(ISAS[0], logits, samples)
        for isa in ISAS[1:]:
            other, _ = sample_native(isa, logits, samples)
            for name in RESULT_FIELDS:
                assert getattr(first, name).tobytes() == getattr(other, name).tobytes(), (isa, size, name)


@every_isa
def test_rows_do_not_see_each_other_nor_their_surroundings(isa: str) -> None:
    """Any order, alone or together, at any alignment, between NaN guards: the same bits. Inputs stay as they were."""
    rng = np.random.default_rng(5)
    for size in (5, 64, 1000):
        count = 24
        logits = (rng.standard_normal((count, size)) * 3).astype(np.float32)
        samples = mixed_rows(rng, count)
        together, _ = sample_native(isa, logits, samples)
        order = rng.permutation(count)
        shuffled, _ = sample_native(isa, logits[order], SampleRows(samples.rows[order]))
        for name in RESULT_FIELDS:
            np.testing.assert_array_equal(getattr(together, name)[order], getattr(shuffled, name))
        for i in range(count):
            guarded = np.full(size + 40, np.nan, np.float32)
            view = guarded[i + 1 : i + 1 + size].reshape(1, size)
            view[0] = logits[i]
            before = guarded.copy()
            alone, status = sample_native(isa, view, SampleRows(samples.rows[i : i + 1]))
            assert status[0] == OK
            assert before.tobytes() == guarded.tobytes()
            width = alone.top_tokens.shape[1]
            assert alone.tokens[0] == together.tokens[i]
            np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[i])
            np.testing.assert_array_equal(alone.top_logprobs[0], together.top_logprobs[i, :width])


@every_isa
def test_a_tokens_logprob_equals_its_entry_among_the_alternatives(isa: str) -> None:
    logits = np.random.default_rng(2).standard_normal((30, 40)).astype(np.float32)
    got, _ = sample_native(isa, logits, sampled_rows(30, temperature=1.0, num_logprobs=40))
    for i in range(30):
        (at,) = np.flatnonzero(got.top_tokens[i] == got.tokens[i])
        assert got.top_logprobs[i, at] == got.logprobs[i]


@every_isa
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 2.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.4},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
def test_frequencies_equal_probabilities(isa: str, fields: dict[str, float]) -> None:
    count = 60_000
    samples = sampled_rows(count, seed=2**40 + 9, **fields)
    tokens = sample_native(isa, np.tile(LOGITS, (count, 1)), samples)[0].tokens
    p = probabilities(LOGITS, samples.rows[0], samples)
    assert chi_square_excess(np.bincount(tokens, minlength=7), p) < 1
    wrong = sampled_rows(1, **{**fields, "temperature": fields["temperature"] * 1.3})
    assert chi_square_excess(np.bincount(tokens, minlength=7), probabilities(LOGITS, wrong.rows[0], wrong)) > 1


@every_isa
def test_a_planted_error_is_caught(isa: str) -> None:
    """A definition that also punishes prompt tokens for presence disagrees with the kernel."""
    rng = np.random.default_rng(1)
    disagreements = 0
    for i in range(50):
        logits = rng.standard_normal((1, 8)).astype(np.float32)
        prompt = dict.fromkeys(range(4), 0)
        right = one_row(seed=i, temperature=1.0, presence_penalty=1.5, counts=prompt)
        wrong = one_row(seed=i, temperature=1.0, presence_penalty=1.5, counts=dict.fromkeys(prompt, 1))
        check(isa, logits, right)
        disagreements += sample_native(isa, logits, right)[0].tokens[0] != sample_reference(logits, wrong).tokens[0]
    assert disagreements > 5
