"""Random answers under random schemas, byte by byte along the masks, are what another validator calls valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_vocabulary import ENDS, VOCAB, GrammarTokenizer, constraint_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.errors import ParameterError
from paceline.params import Structure
from paceline.sampling.constraint import Constraint
from paceline.sampling.distribution import allowed_tokens

LONGEST = 400
NAMES = st.sampled_from(["a", "b", "c", "name"])
FINISHERS = set(b'"}],:{[0123abtruefalsn')
"""Bytes that random answers prefer: noise inside of texts would never come to an end."""

scalars = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["x", 1, None, {"k": [1]}]}, {"const": 7}]),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-50, 50),
              st.integers(0, 99)),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 3.5}, st.integers(-3, 3)),
    st.builds(lambda step: {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 99}, st.integers(1, 9)),
    st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span}, st.integers(0, 3),
              st.integers(0, 4)),
    st.sampled_from([{"type": "string", "pattern": "^[ab]{1,3}$"}, {"type": "string", "pattern": "b"},
                     {"type": "string", "format": "date"}, {"type": ["integer", "null"], "maximum": 9}]),
)  # fmt: skip


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(NAMES, inner, max_size=3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": properties},
        optional={
            "required": st.lists(NAMES, unique=True, max_size=3),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(st.sampled_from(["^x", "^[yz]+$"]), inner, max_size=1),
            "minProperties": st.integers(0, 3),
            "maxProperties": st.integers(2, 4),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 3),
        },
    )
    unions = st.builds(lambda kind, parts: {kind: parts}, st.sampled_from(["anyOf", "oneOf", "allOf"]),
                       st.lists(inner, min_size=1, max_size=2))  # fmt: skip
    return st.one_of(objects, arrays, unions)


schemas = st.recursive(scalars, containers, max_leaves=5)


def random_answer(constraint: Constraint, rng: random.Random) -> str | None:
    """An answer that follows the masks; None if it does not come to an end."""
    tokenizer, data = GrammarTokenizer(), bytearray()
    for _ in range(LONGEST):
        (mask,) = constraint.masks()
        if constraint.error is not None:
            return None
        allowed = np.flatnonzero(allowed_tokens(mask, VOCAB)).tolist()
        assert allowed, "a structure that leads nowhere"
        likely = [token for token in allowed if token in FINISHERS or token in ENDS or token > 255]
        token = rng.choice(likely if likely and rng.random() < 0.95 else allowed)
        if token in ENDS:
            break
        data += tokenizer.token_bytes(token)
        constraint.advance(token)
        if constraint.is_done:
            break
    else:
        return None
    return data.decode()


EXCLUDED = {"type": "number", "exclusiveMinimum": 3, "maximum": 6.5}
BOUNDED = {"type": "number", "exclusiveMinimum": 0, "maximum": 3.5}


@settings(max_examples=150, deadline=None)
@example(schema={"allOf": [BOUNDED, EXCLUDED]}, seed=0)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_answers_are_valid(schema: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        try:
            constraint = constraint_of(Structure("json_schema", json.dumps(schema)))
        except ParameterError:
            assume(False)
        text = random_answer(constraint, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_an_answer_under_another_schema_would_be_seen() -> None:
    constraint = constraint_of(Structure("json_schema", '{"type": "integer", "minimum": 5}'))
    text = random_answer(constraint, random.Random(1))
    assert text is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), {"type": "integer", "maximum": 4})
