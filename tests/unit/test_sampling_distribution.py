"""The distribution of each output against loops over sorted lists, every parameter alone and in combination."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sampling.distribution import (
    NoTokenError,
    kept,
    log_softmax,
    probabilities,
    ranking,
    top_alternatives,
    transform,
)
from paceline.sampling.rows import SampleRows, greedy_rows


def one_row(
    *,
    counts: dict[int, int] | None = None,
    bias: dict[int, float] | None = None,
    banned: list[int] | None = None,
    allowed: list[bool] | None = None,
    **fields: Any,
) -> SampleRows:
    """One row whose lists do not start at 0 of the flat arrays."""
    counts, bias, banned = counts or {}, bias or {}, banned or []
    rows = greedy_rows(1).rows
    for name, value in fields.items():
        rows[name] = value
    for name, values in (("counts", counts), ("bias", bias), ("banned", banned)):
        rows[f"{name}_start"], rows[f"{name}_len"] = 1, len(values)
    if allowed is not None:
        rows["mask"] = 1
    return SampleRows(
        rows,
        count_tokens=np.array([0, *counts], np.int32),
        count_values=np.array([99, *counts.values()], np.int32),
        bias_tokens=np.array([0, *bias], np.int32),
        bias_values=np.array([99.0, *bias.values()], np.float32),
        banned_tokens=np.array([0, *banned], np.int32),
        mask_words=np.zeros((0, 0), np.uint32) if allowed is None else masks([False] * len(allowed), allowed),
    )


def masks(*allowed: list[bool]) -> NDArray[np.uint32]:
    """The words of some masks, bit by bit."""
    words = np.zeros((len(allowed), -(-len(allowed[0]) // 32)), np.uint32)
    for mask, bits in enumerate(allowed):
        for token, bit in enumerate(bits):
            words[mask, token // 32] |= np.uint32(bit << (token % 32))
    return words


def slow_transform(
    logits: NDArray[np.float32],
    fields: dict[str, float],
    counts: dict[int, int],
    bias: dict[int, float],
    banned: list[int],
    allowed: list[bool] | None = None,
) -> list[np.float32]:
    """Token by token, everything that applies to it, one rounding an operation."""
    f32 = np.float32
    result = []
    for token, x in enumerate(logits):
        if token in bias:
            x = f32(x + f32(bias[token]))
        if token in banned or (allowed is not None and not allowed[token]):
            x = f32(-np.inf)
        if token in counts:
            penalty = f32(fields.get("repetition_penalty", 1.0))
            x = f32(x / penalty) if x > 0 else f32(x * penalty)
            x = f32(x - f32(f32(fields.get("frequency_penalty", 0.0)) * f32(counts[token])))
            if counts[token] > 0:
                x = f32(x - f32(fields.get("presence_penalty", 0.0)))
        if fields.get("temperature", 0.0) > 0:
            x = f32(x / f32(fields["temperature"]))
        result.append(x)
    return result


def slow_probabilities(z: list[np.float32], fields: dict[str, float]) -> list[float]:
    """Sort, then cut the list once a filter; math.fsum so that the masses are exact to rounding."""
    order = sorted((token for token in range(len(z)) if z[token] > -np.inf), key=lambda token: (-z[token], token))
    if fields.get("temperature", 0.0) == 0:
        return [1.0 if token == order[0] else 0.0 for token in range(len(z))]
    weight = {token: math.exp(float(z[token]) - float(z[order[0]])) for token in order}
    if fields.get("top_k", 0):
        order = order[: int(fields["top_k"])]
    if fields.get("top_p", 1.0) < 1:
        need = float(np.float32(fields["top_p"])) * math.fsum(weight[token] for token in order)
        length = 1
        while length < len(order) and math.fsum(weight[token] for token in order[:length]) < need * (1 - 1e-15):
            length += 1
        order = order[:length]
    if fields.get("min_p", 0.0) > 0:
        least = np.float32(math.log(np.float32(fields["min_p"])))
        order = [token for token in order if np.float32(z[token] - z[order[0]]) >= least]
    total = math.fsum(weight[token] for token in order)
    return [weight[token] / total if token in order else 0.0 for token in range(len(z))]


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.9, "repetition_penalty": 1.5, "counts": {0: 0, 2: 3}},
    {"temperature": 0.9, "repetition_penalty": 0.5, "counts": {0: 0, 2: 3}},
    {"temperature": 0.9, "frequency_penalty": 0.5, "counts": {0: 0, 2: 3}},
    {"temperature": 0.9, "presence_penalty": -1.5, "counts": {0: 0, 2: 3}},
    {"temperature": 0.9, "bias": {1: 5.0, 3: -100.0}},
    {"temperature": 0.9, "banned": [1, 4]},
    {"bias": {6: 50.0}},
    {"banned": [0, 1, 2, 3, 4, 5]},
    {"allowed": [False, True, False, True, True, False, False]},
    {"temperature": 0.9, "top_p": 0.7, "allowed": [True, False, True, True, True, True, False], "banned": [0]},
    {
        "temperature": 0.9,
        "repetition_penalty": 1.5,
        "counts": {0: 0, 2: 3},
        "allowed": [True, True, False] + [True] * 4,
    },
    {
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "counts": {1: 1, 5: 0},
        "bias": {1: 2.0},
        "banned": [3],
    },
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "logits", [[1.5, -0.5, 2.0, 0.25, -3.0, 2.0, 1.0], [0.0] * 7, [-1, -2, -3, -4, -5, -6, -7]], ids=str
)
def test_each_parameter_against_loops(case: dict[str, Any], logits: list[float]) -> None:
    check_against_loops(np.array(logits, np.float32), case)


def check_against_loops(x: NDArray[np.float32], case: dict[str, Any]) -> None:
    fields = {name: value for name, value in case.items() if name not in ("counts", "bias", "banned", "allowed")}
    samples = one_row(**case)
    row = samples.rows[0]
    before = x.copy()
    z = transform(x, row, samples)
    lists = case.get("counts", {}), case.get("bias", {}), case.get("banned", []), case.get("allowed")
    expected_z = slow_transform(x, fields, *lists)
    assert z.dtype == np.float32
    assert z.tolist() == [float(v) for v in expected_z]
    np.testing.assert_array_equal(x, before)
    p = probabilities(x, row, samples)
    # exp, one sum and one division in float64 each: a handful of roundings.
    np.testing.assert_allclose(p, slow_probabilities(expected_z, fields), rtol=1e-13, atol=0)
    if fields.get("temperature", 0) > 0:
        np.testing.assert_array_equal(kept(z, row), p > 0)


# Halves make exact ties; powers of two as probabilities make masses that reach top_p exactly.
logit = st.one_of(st.integers(-6, 6).map(lambda i: i / 2), st.floats(-8, 8, width=32))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.integers(1, 12))
def test_combinations_against_loops(data: st.DataObject, size: int) -> None:
    token = st.integers(0, size - 1)
    banned = data.draw(st.lists(token, max_size=size - 1, unique=True))
    case = {
        "temperature": data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        "top_k": data.draw(st.integers(0, size + 1)),
        # Not attained by ratios of exponentials of the logits above, whose sums the two sides round differently.
        "top_p": data.draw(st.sampled_from([1.0, 0.9137, 0.5171, 0.1093])),
        "min_p": data.draw(st.sampled_from([0.0, 0.1, 0.7])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.3, 0.6])),
        "presence_penalty": data.draw(st.sampled_from([0.0, 0.5, -0.5])),
        "frequency_penalty": data.draw(st.sampled_from([0.0, 0.25, -0.5])),
        "counts": data.draw(st.dictionaries(token, st.integers(0, 3))),
        "bias": data.draw(st.dictionaries(token, st.floats(-4, 4, width=32))),
        "banned": banned,
    }
    if data.draw(st.booleans()):
        allowed = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        left = next(token for token in range(size) if token not in banned)
        case["allowed"] = [*allowed[:left], True, *allowed[left + 1 :]]
    check_against_loops(np.array(data.draw(st.lists(logit, min_size=size, max_size=size)), np.float32), case)


def test_top_p_keeps_the_smallest_prefix_and_breaks_ties_by_id() -> None:
    z = np.zeros(8, np.float32)
    for p, count in ((0.5, 4), (0.500001, 5), (0.125, 1), (0.999, 8)):
        np.testing.assert_array_equal(kept(z, one_row(temperature=1, top_p=p).rows[0]), np.arange(8) < count)
    np.testing.assert_array_equal(kept(z, one_row(temperature=1, top_k=3).rows[0]), np.arange(8) < 3)


def test_filters_apply_in_order_on_what_is_left() -> None:
    # Masses 8, 4, 2, 1 (of 15). top_p alone needs 3 tokens for 0.9; after top_k=2 (8 + 4 = 12) it needs both, and for
    # 0.6 only the first.
    z = np.log(np.array([8, 4, 2, 1], np.float32))
    assert kept(z, one_row(temperature=1, top_p=0.9).rows[0]).sum() == 3
    assert kept(z, one_row(temperature=1, top_p=0.6, top_k=2).rows[0]).sum() == 1
    assert kept(z, one_row(temperature=1, top_p=0.9, top_k=2).rows[0]).sum() == 2


def test_a_wrong_rule_would_be_seen() -> None:
    """A presence penalty that also hits prompt tokens gives another distribution, and the comparison above notices."""
    x = np.array([1.0, 2.0, 0.0], np.float32)
    right = one_row(temperature=1, presence_penalty=1.0, counts={1: 0})
    wrong = one_row(temperature=1, presence_penalty=1.0, counts={1: 1})
    p, q = (probabilities(x, s.rows[0], s) for s in (right, wrong))
    np.testing.assert_allclose(p, np.exp(x) / np.exp(x).sum(), rtol=1e-6)
    assert abs(p - q).max() > 0.1
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(p, q, rtol=1e-13)


def test_nothing_to_choose_from() -> None:
    x = np.zeros(3, np.float32)
    nothing = [False] * 3
    for samples in (
        one_row(banned=[0, 1, 2]),
        one_row(temperature=1, banned=[2, 1, 0]),
        one_row(temperature=1, allowed=nothing),
    ):
        with pytest.raises(NoTokenError, match="banned"):
            probabilities(x, samples.rows[0], samples)
    for bad in (np.nan, np.inf, -np.inf):
        samples = one_row(temperature=1)
        with pytest.raises(NoTokenError, match="finite"):
            probabilities(np.array([0, bad, 1], np.float32), samples.rows[0], samples)
    past_the_arrays = one_row()
    past_the_arrays.rows["banned_len"] = 5
    no_such_mask = one_row(allowed=nothing)
    no_such_mask.rows["mask"] = 2
    for samples in (
        one_row(bias={3: 1.0}),
        one_row(banned=[-1]),
        one_row(counts={7: 1}),
        past_the_arrays,
        no_such_mask,
    ):
        with pytest.raises(NoTokenError, match="outside"):
            transform(x, samples.rows[0], samples)


def test_log_softmax_and_alternatives() -> None:
    x = np.array([[0.0, 1.0, 1.0, -2.0], [500.0, 0.0, 500.0, 499.0]], np.float32)
    expected = np.stack([np.log(np.exp(r - r.max()) / np.exp(r - r.max()).sum()) for r in x.astype(np.float64)])
    np.testing.assert_allclose(log_softmax(x), expected, rtol=1e-14)
    assert ranking(x[1]).tolist() == [0, 2, 3, 1]
    tokens, values = top_alternatives(x[0], 3)
    assert tokens.tolist() == [1, 2, 0]
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(values, log_softmax(x[0])[[1, 2, 0]].astype(np.float32))
    assert len(top_alternatives(x[0], 9)[0]) == 4
