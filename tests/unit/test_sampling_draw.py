"""Draws: the generator against published answers, frequencies against ``probabilities``, what a draw may depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sampling.distribution import log_softmax, probabilities
from paceline.sampling.draw import gumbel, philox4x32, sample_reference, uniforms, words
from paceline.sampling.rows import SampleRows, greedy_rows


def sampled_rows(count: int, **fields: float) -> SampleRows:
    """Rows at positions 0, 1, 2 ... that share everything else."""
    samples = greedy_rows(count)
    samples.rows["position"] = np.arange(count)
    for name, value in fields.items():
        samples.rows[name] = value
    return samples


def chi_square_excess(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Chi-square of counts against p, over its value that chance exceeds once in a million (Wilson and Hilferty 1931).

    Infinite if something of probability zero happened.
    """
    if counts[p == 0].any():
        return np.inf
    counts, p = counts[p > 0], p[p > 0]
    if len(p) == 1:
        return 0.0
    expected = p * counts.sum()
    assert expected.min() >= 5, "too few draws for the statistic"
    freedom = len(p) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts - expected) ** 2 / expected).sum() / limit)


# Random123 1.14, tests/kat_vectors: philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert philox4x32(np.array([counter, counter], np.uint32), key).tolist() == [list(answer)] * 2


def test_words_follow_the_contract() -> None:
    seed, position = 0x0123456789ABCDEF, 77
    for token, word in enumerate(words(seed, position, 11)):
        counter = np.array([[token // 4, position, 0, 0]], np.uint32)
        assert word == philox4x32(counter, (0x89ABCDEF, 0x01234567))[0, token % 4]


def test_uniforms_and_gumbel_stay_finite_at_the_ends() -> None:
    u = uniforms(3, 4, 100_000)
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    # Standard error of a mean of 1e5: uniform 0.0009, Gumbel 0.004; five of them.
    assert abs(u.mean() - 0.5) < 0.0046
    noise = gumbel(3, 4, 100_000)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.021
    np.testing.assert_allclose(noise, -np.log(-np.log(u)), rtol=1e-9, atol=1e-12)


LOGITS = np.array([1.0, 0.2, -1.0, 1.0, 0.5, -0.3, 0.1], np.float32)
FIELDS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.75},
    {"temperature": 1.0, "min_p": 0.5},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_frequencies_equal_probabilities(fields: dict[str, float]) -> None:
    count = 2000
    samples = sampled_rows(count, seed=12, **fields)
    tokens = sample_reference(np.tile(LOGITS, (count, 1)), samples).tokens
    p = probabilities(LOGITS, samples.rows[0], samples)
    assert chi_square_excess(np.bincount(tokens, minlength=7), p) < 1


def test_wrong_frequencies_are_noticed() -> None:
    samples = sampled_rows(2000, seed=12, temperature=1.0)
    counts = np.bincount(sample_reference(np.tile(LOGITS, (2000, 1)), samples).tokens, minlength=7)
    for fields in ({"temperature": 1.8}, {"temperature": 1.0, "top_k": 6}):
        wrong = sampled_rows(1, **fields)
        assert chi_square_excess(counts, probabilities(LOGITS, wrong.rows[0], wrong)) > 1


def test_a_draw_depends_on_seed_and_position_only() -> None:
    rng = np.random.default_rng(0)
    count = 40
    logits = rng.standard_normal((count, 33)).astype(np.float32)
    samples = sampled_rows(count, temperature=1.0, num_logprobs=2)
    samples.rows["seed"] = rng.integers(0, 2**63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    together = sample_reference(logits, samples)
    order = rng.permutation(count)
    shuffled = sample_reference(logits[order], SampleRows(samples.rows[order]))
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(getattr(together, name)[order], getattr(shuffled, name))
    for field, changed in (
        ("seed", samples.rows["seed"] ^ np.uint64(1 << 63)),
        ("position", samples.rows["position"] + 1),
    ):
        rows = samples.rows.copy()
        rows[field] = changed
        assert (sample_reference(logits, SampleRows(rows)).tokens != together.tokens).any()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), size=st.integers(1, 20), drop=st.integers(0, 19))
def test_noise_does_not_depend_on_what_is_kept(seed: int, size: int, drop: int) -> None:
    """Removing a token that was not drawn does not change the draw: what coupled speculation relies on."""
    logits = np.linspace(0, 1, size, dtype=np.float32)[None]
    samples = sampled_rows(1, seed=seed, temperature=1.0)
    token = sample_reference(logits, samples).tokens[0]
    if drop >= size or drop == token:
        return
    banned = sampled_rows(1, seed=seed, temperature=1.0, banned_len=1).rows
    without = SampleRows(banned, banned_tokens=np.array([drop], np.int32))
    assert sample_reference(logits, without).tokens[0] == token


def test_what_is_reported() -> None:
    logits = np.array([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [np.nan, 3.0, 1.0]], np.float32)
    samples = greedy_rows(4)
    samples.rows["num_logprobs"] = [0, 2, -1, 2]
    samples.rows["forced"] = [-1, 0, 2, -1]
    samples.rows["temperature"] = [0.5, 0.5, 0.5, 0.5]
    samples.rows["bias_len"] = [1, 0, 0, 0]
    samples = SampleRows(samples.rows, bias_tokens=np.array([2], np.int32), bias_values=np.array([90], np.float32))
    result = sample_reference(logits, samples)
    assert result.tokens.tolist() == [2, 0, 2, -1]
    lp = log_softmax(logits[0]).astype(np.float32)  # of the model's own logits: no bias, no temperature
    np.testing.assert_array_equal(result.logprobs, np.array([lp[2], lp[0], np.nan, np.nan], np.float32))
    assert result.top_tokens.tolist() == [[-1, -1], [1, 2], [-1, -1], [-1, -1]]
    np.testing.assert_array_equal(result.top_logprobs[1], lp[[1, 2]])
    assert np.isnan(result.top_logprobs[[0, 2, 3]]).all()
    forced = greedy_rows(1)
    forced.rows["forced"] = 3
    assert sample_reference(logits[:1], forced).tokens.tolist() == [-1]
    assert sample_reference(logits[:0], greedy_rows(0)).tokens.shape == (0,)
