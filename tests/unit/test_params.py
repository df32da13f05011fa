"""SamplingParams accepts what makes sense, in the form it is wanted, and names what does not."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError, ParameterError
from paceline.params import MAX_ALTERNATIVES, LogitBias, SamplingParams
from paceline.sampling.rows import MAX_LOGPROBS


def test_defaults_are_greedy_and_unfiltered() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params == SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        seed=None,
        n=1,
        max_tokens=None,
        min_tokens=0,
        stop=(),
        stop_token_ids=(),
        ignore_eos=False,
        logprobs=None,
        prompt_logprobs=None,
    )
    assert MAX_ALTERNATIVES == MAX_LOGPROBS


IMPOSSIBLE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 1e-4),
    ("temperature", 1001.0),
    ("temperature", "0.7"),
    ("temperature", True),
    ("temperature", None),
    ("temperature", 10**400),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -0.5),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e-300),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: -math.inf}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", [(5, 1.0)]),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 3]),
    ("stop", b"a"),
    ("stop", 7),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("logprobs", -1),
    ("logprobs", MAX_ALTERNATIVES + 1),
    ("logprobs", True),
    ("prompt_logprobs", 65),
] + [
    (field, value)
    for field in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    for value in (math.nan, math.inf, -math.inf)
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE, ids=lambda x: repr(x)[:30])
def test_impossible_values_name_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert error.field == field
    assert error.allowed
    assert str(error).startswith(f"{field}=")
    assert isinstance(error, PacelineError)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_min_tokens_beyond_max_tokens() -> None:
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(ParameterError, match=r"max_tokens \(3\)"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_bounds_themselves_are_allowed() -> None:
    SamplingParams(temperature=1e-3, top_p=1e-6, min_p=1.0, repetition_penalty=0.01, seed=2**64 - 1, logprobs=0)
    SamplingParams(
        temperature=1e3, top_k=2**31 - 1, logit_bias={0: -100, 1: 100}, presence_penalty=-2, n=128, logprobs=64
    )


def test_strings_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", None, "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop=[None]).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3, np.int64(4)]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]


def test_numbers_become_plain() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(4), top_p=1)  # type: ignore[arg-type]
    assert [type(value) for value in (params.temperature, params.top_k, params.top_p)] == [float, int, float]
    assert not params.is_greedy


def test_bias_is_a_sorted_copy_that_cannot_be_changed() -> None:
    given_bias = {7: 1, 3: -2.5}
    params = SamplingParams(logit_bias=given_bias)
    given_bias[9] = 1.0
    assert params.logit_bias == {3: -2.5, 7: 1.0}
    assert list(params.logit_bias) == [3, 7]
    with pytest.raises(TypeError):
        params.logit_bias[3] = 0.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_copies_equal_and_hash_alike() -> None:
    params = SamplingParams(temperature=0.7, logit_bias={7: 1.0}, stop=("x",))
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert other == params
        assert hash(other) == hash(params)
    assert dataclasses.replace(params, logit_bias={7: 2.0}) != params
    assert isinstance(dataclasses.asdict(params)["logit_bias"], LogitBias)
    with pytest.raises(ParameterError):
        dataclasses.replace(params, top_p=2.0)


def test_validate_for_names_ids_beyond_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={99: 1.0}, stop_token_ids=(5,))
    params.validate_for(100)
    with pytest.raises(ParameterError, match=r"logit_bias=99 .*between 0 and 98"):
        params.validate_for(99)
    with pytest.raises(ParameterError, match="stop_token_ids=5"):
        SamplingParams(stop_token_ids=(5,)).validate_for(5)


@given(
    field=st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2)), max_size=3),
        st.dictionaries(st.integers(-2, 9), st.floats(), max_size=2),
    ),
)
def test_any_value_is_either_normalised_or_refused_by_name(field: str, value: Any) -> None:
    try:
        params = SamplingParams(**{field: value})
    except ParameterError as error:
        named = error.field
    else:
        named = None
    if named is not None:
        assert named in (field, "min_tokens")
        return
    assert dataclasses.replace(params) == params
    hash(params)
