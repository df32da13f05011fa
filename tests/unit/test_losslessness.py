"""The comparer of `paceline verify`: it must see every difference, and excuse none but rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fake_executor import tiny_model
from numpy.typing import NDArray

from paceline.config import Experts
from paceline.measure.losslessness import (
    Answer,
    Difference,
    Position,
    Rounding,
    compare_formats,
    first_difference,
    jump_square,
    relative_drift,
    relative_rounding,
    same_bits,
)
from paceline.measure.trace import TopTwo

TOP = TopTwo((5, 7), (-1.25, -2.5))
POSITION = Position(10, 5, -0.5, TOP, ((5, -0.5), (7, -1.75)))
ANSWER = Answer((POSITION, replace(POSITION, index=11), replace(POSITION, index=12)), ("length", "text"))


def next_float(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(np.inf)))


def with_second(**changes: object) -> Answer:
    first, second, third = ANSWER.positions
    return replace(ANSWER, positions=(first, replace(second, **changes), third))  # type: ignore[arg-type]


def found(other: Answer, expected: Answer = ANSWER) -> Difference | None:
    return first_difference("request", expected, other)


def test_equal_answers_have_no_difference() -> None:
    assert found(replace(ANSWER, positions=tuple(replace(position) for position in ANSWER.positions))) is None


def test_bits_are_not_values() -> None:
    assert same_bits(0.1, 0.1)
    assert not same_bits(0.0, -0.0)
    assert not same_bits(-1.0, next_float(-1.0))
    assert not same_bits(-3.0, -2.0), "two negative numbers"
    assert same_bits(None, None)
    assert not same_bits(None, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"token": 6},
        {"logprob": next_float(-0.5)},
        {"logprob": None},
        {"top": replace(TOP, tokens=(5, 8))},
        {"top": replace(TOP, logits=(next_float(-1.25), -2.5))},
        {"top": replace(TOP, logits=(-1.25, next_float(-2.5)))},
        {"top": None},
        {"alternatives": ((5, -0.5), (8, -1.75))},
        {"alternatives": ((5, -0.5), (7, next_float(-1.75)))},
        {"alternatives": ((5, -0.5),)},
    ],
)
def test_every_bit_of_a_position_counts(changes: dict[str, object]) -> None:
    other = with_second(**changes)
    difference = found(other)
    assert difference is not None
    assert (difference.request, difference.position) == ("request", 11)
    assert difference.expected == TOP
    assert difference.found == other.positions[1].top
    assert found(ANSWER, expected=other) is not None


def test_zero_and_minus_zero_differ() -> None:
    zero, minus = (with_second(logprob=value) for value in (0.0, -0.0))
    assert found(zero, expected=minus) is not None
    tops = [with_second(top=replace(TOP, logits=(value, -2.5))) for value in (0.0, -0.0)]
    assert found(tops[0], expected=tops[1]) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_equal_even_to_itself(value: float) -> None:
    for changes in (
        {"logprob": value},
        {"top": replace(TOP, logits=(value, -2.5))},
        {"alternatives": ((5, -0.5), (7, value))},
    ):
        broken = with_second(**changes)
        difference = found(broken, expected=broken)
        assert difference is not None
        assert (difference.position, difference.what) == (11, "not a number")


def test_missing_and_extra_tokens() -> None:
    short = replace(ANSWER, positions=ANSWER.positions[:2])
    early, late = found(short), found(ANSWER, expected=short)
    assert early is not None
    assert late is not None
    assert (early.position, early.expected, early.found) == (12, TOP, None)
    assert (late.position, late.expected, late.found) == (12, None, TOP)
    assert found(replace(ANSWER, positions=())) is not None


def test_ends_that_differ() -> None:
    for ending in (("stop", "text"), ("length", "tex")):
        difference = found(replace(ANSWER, ending=ending))
        assert difference is not None
        assert difference.position is None


def test_the_first_of_two_differences_is_told() -> None:
    both = replace(with_second(token=6), ending=("stop", "text"))
    difference = found(both)
    assert difference is not None
    assert difference.position == 11


def test_margin() -> None:
    assert TOP.margin == 1.25


# Formats

MODEL = tiny_model(200)
NUM_PROMPT = 30


def logits(seed: int = 0, *, count: int = NUM_PROMPT + 3) -> NDArray[np.float32]:
    return (3 * np.random.default_rng(seed).standard_normal((count, 200))).astype(np.float32)


def moved(x: NDArray[np.float32], deviation: float) -> NDArray[np.float32]:
    return x + (deviation * np.random.default_rng(9).standard_normal(x.shape)).astype(np.float32)


def compare(other: NDArray[np.float32], tokens: tuple[list[int], list[int]] = ([1, 2, 3], [1, 2, 3])) -> Rounding:
    return compare_formats(logits(), other, num_prompt=NUM_PROMPT, tokens=tokens, model=MODEL, formats=("f16", "int8"))


def test_small_noise_is_a_tie_and_its_size_is_reported() -> None:
    rounding = compare(moved(logits(), 0.03))
    assert rounding.is_tie
    assert rounding.drift == pytest.approx(0.03, rel=0.05)
    # KL of a softmax under small independent noise is half its variance over the distribution.
    assert 0 < rounding.mean_kl < 0.03**2
    assert rounding.margin is None
    assert rounding.num_positions == NUM_PROMPT + 3


def test_equal_logits_move_nothing() -> None:
    rounding = compare(logits())
    assert (rounding.drift, rounding.mean_kl) == (0.0, 0.0)
    assert rounding.is_tie


def test_a_shift_of_all_logits_is_no_drift() -> None:
    assert compare(logits() + np.float32(2)).drift < 1e-6


def test_noise_beyond_the_bound_fails() -> None:
    bound = compare(logits()).drift_bound
    assert not compare(moved(logits(), 1.2 * bound)).is_tie
    assert compare(moved(logits(), 0.8 * bound)).is_tie


def test_other_logits_altogether_fail() -> None:
    assert not compare(logits(1)).is_tie


def test_a_mixture_of_experts_may_move_further_but_not_anywhere() -> None:
    dense, mixture = MODEL, replace(MODEL, experts=Experts(8, 2, 64))
    square = 1e-4
    assert relative_drift(dense, square) == pytest.approx(math.sqrt(MODEL.num_layers * square))
    assert relative_drift(replace(MODEL, experts=Experts(2, 2, 64)), square) == relative_drift(dense, square)
    assert relative_drift(dense, square) < relative_drift(mixture, square) < 1
    assert relative_drift(replace(mixture, num_layers=48), 1e-3) == 1
    other = compare_formats(
        logits(),
        logits(1),
        num_prompt=NUM_PROMPT,
        tokens=([1], [1]),
        model=replace(mixture, num_layers=48),
        formats=("f16", "int8"),
    )
    assert not other.is_tie


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (16, 4), (128, 8)])
def test_jumps_of_a_mixture_are_those_of_a_simulation(num_experts: int, num_chosen: int) -> None:
    """Rows choose by logits and by logits that are a little off; experts give independent vectors of norm 1, each of a
    direction of its own, so what changes is the square of the weights on experts that differ."""
    error, rows = 0.01, 200_000
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((rows, num_experts)).astype(np.float32)
    moved = plain + error * rng.standard_normal(plain.shape).astype(np.float32)

    def weights(logits: NDArray[np.float32]) -> NDArray[np.float32]:
        smallest = np.partition(logits, -num_chosen, axis=1)[:, -num_chosen, None]
        scores = np.exp(logits) * (logits >= smallest)
        return np.asarray(scores / scores.sum(axis=1, keepdims=True))

    ours, theirs = weights(plain), weights(moved)
    flipped = ((ours > 0) != (theirs > 0)).any(axis=1)
    jump = (((ours - theirs) ** 2).sum(axis=1) / (ours**2).sum(axis=1))[flipped].sum() / rows
    bound = jump_square(num_experts, num_chosen, error)
    assert bound / 4 < jump < bound


def test_a_token_that_was_well_ahead_does_not_lose_by_rounding() -> None:
    """The logits of the prompt hardly move, yet the second drawn token is another: only a close one is excused."""
    row = logits()[NUM_PROMPT + 1]
    order = np.argsort(row)
    best, last = int(order[-1]), int(order[0])
    other = moved(logits(), 0.01)
    wrong = compare(other, ([1, best, 3], [1, last, 4]))
    assert wrong.margin == pytest.approx(float(row[best] - row[last]))
    assert wrong.num_positions == NUM_PROMPT + 2
    assert not wrong.is_tie
    close = int(np.argmin(np.abs(row - row[best]) + 1e9 * (np.arange(200) == best)))
    bound = wrong.margin_bound
    assert compare(other, ([1, best, 3], [1, close, 4])).is_tie == (float(row[best] - row[close]) <= bound)


def test_not_a_number_is_no_tie() -> None:
    broken = logits()
    broken[3, 4] = np.nan
    assert not compare(broken).is_tie


def test_coarser_formats_may_move_more() -> None:
    assert (
        0
        < relative_rounding("f32", 64)
        < relative_rounding("f16", 64)
        < relative_rounding("bf16", 64)
        < relative_rounding("int8", 64)
        < 0.02
    )


def test_the_bound_of_int8_holds_for_the_worst_vector() -> None:
    """One component holds nearly the whole norm, so that the step is as large as it can be against it; the others lie
    anywhere in three steps."""
    x = np.random.default_rng(0).uniform(-1.5 / 127, 1.5 / 127, (4000, 64))
    x[:, 0] = 1.0
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    error = np.linalg.norm(np.rint(x / step) * step - x, axis=1) / np.linalg.norm(x, axis=1)
    assert 0.95 * relative_rounding("int8", 64) < np.sqrt(np.mean(error**2)) <= relative_rounding("int8", 64)
