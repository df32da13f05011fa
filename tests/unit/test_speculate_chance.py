"""The random choices of verification: which numbers they use, and that they follow the probabilities they are given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sampling import draw
from paceline.sampling.draw import acceptance_uniforms, philox4x32, uniforms
from paceline.speculate.chance import Chance, PhiloxChance, token_at

SEED = 0x0123456789ABCDEF


def test_uniforms_follow_the_contract() -> None:
    for i, u in enumerate(acceptance_uniforms(SEED, 77, 5, 9).tolist(), start=5):
        word = philox4x32(np.array([[i, 77, 1, 0]], np.uint32), (0x89ABCDEF, 0x01234567))[0].tolist()
        assert u == ((word[0] << 20 | word[1] >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_uniforms_never_reach_their_ends(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "philox4x32", lambda counter, key: np.full(counter.shape, word, np.uint32))
    (u,) = acceptance_uniforms(0, 0, 0, 1)
    assert 0 < u < 1


def test_no_counter_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by two steps of a request, nor by a step and the noise of tokens."""
    seen: list[tuple[int, ...]] = []

    def record(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
        seen.extend(map(tuple, counter.tolist()))
        return philox4x32(counter, key)

    monkeypatch.setattr(draw, "philox4x32", record)
    for position in range(8):
        uniforms(SEED, position, 500)
        chance = PhiloxChance(SEED, position)
        for _ in range(150):
            chance.happens(0.5)
    assert len(seen) > 8 * (125 + 150)
    assert len(seen) == len(set(seen))


def test_choices_depend_on_seed_and_position_only() -> None:
    def record(chance: Chance) -> list[bool]:
        return [chance.happens(0.5) for _ in range(100)]

    assert record(PhiloxChance(SEED, 3)) == record(PhiloxChance(SEED, 3))
    others = [PhiloxChance(SEED, 4), PhiloxChance(SEED ^ 1, 3), PhiloxChance(SEED ^ 1 << 63, 3)]
    assert all(record(other) != record(PhiloxChance(SEED, 3)) for other in others)
    # One sequence of numbers whatever it is asked: uniform i is compared with the i-th probability.
    chance = PhiloxChance(SEED, 3)
    for i, u in enumerate(acceptance_uniforms(SEED, 3, 0, 100).tolist()):
        assert chance.choose(np.array([0.25, 0.75])) == (u >= 0.25) if i % 2 else chance.happens(0.25) == (u < 0.25)


def test_frequencies() -> None:
    """5000 uniforms over many positions; bounds of five standard errors."""
    p = np.array([0.1, 0.0, 0.6, 0.3])
    count = 5000
    counts, happened = np.zeros(4), 0
    for position in range(count // 50):
        chance = PhiloxChance(11, position)
        for _ in range(50):
            counts[chance.choose(p)] += 1
            happened += chance.happens(0.2)
    assert counts[1] == 0
    assert (abs(counts / count - p) <= 5 * np.sqrt(p * (1 - p) / count)).all()
    assert abs(happened / count - 0.2) < 5 * 0.4 / count**0.5


def test_certainty_and_impossibility() -> None:
    chance = PhiloxChance(1, 1)
    assert all(chance.happens(1.0) and not chance.happens(0.0) for _ in range(200))


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 5e-324, 1e-12, 0.1, 1 / 3, 0.7, 1.0]), min_size=1, max_size=12),
    u=st.sampled_from([2.0**-53, 2.0**-20, 0.5, 1 - 2.0**-20, 1 - 2.0**-53]),
)
def test_a_chosen_token_is_possible(weights: list[float], u: float) -> None:
    p = np.array(weights)
    if p.sum() < 1e-12:
        return
    before = p.copy()
    token = token_at(p, u)
    assert 0 <= token < len(p)
    assert p[token] > 0
    np.testing.assert_array_equal(p, before)
