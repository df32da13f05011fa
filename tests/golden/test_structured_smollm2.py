"""Structured answers of the real SmolLM2: valid by another validator, and the same on every path."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from paceline.engine.outputs import Completion
from paceline.llm import LLM
from paceline.params import SamplingParams, Structure

PROMPT = "<|im_start|>user\nDescribe {} as JSON.<|im_end|>\n<|im_start|>assistant\n"
SUBJECTS = ("a person", "a city", "a recipe", "a film", "a chemical element", "an order of two books", "a star", "rain")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short."""
    kind = rng.choice(["object", "object", "array", "string", "integer", "number", "enum", "pattern", "union"])
    if depth == 0 or (depth == 1 and kind == "union"):
        kind = "object"
    if kind == "object" and depth < 2:
        names = rng.sample(["name", "kind", "size", "parts", "date"], rng.randint(1, 3))
        required = rng.sample(names, rng.randint(0, len(names)))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array" and depth < 2:
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3}
    if kind == "union":
        return {"anyOf": [{"type": "null"}, random_schema(rng, depth + 1)]}
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 2000)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "blue", 3, None, True, 2.5], 3)}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[A-Z][a-z]{2,8}( [0-9]{1,4})?$"}
    return {"type": "string", "maxLength": rng.randint(0, 20)}


def cases() -> tuple[list[str], list[SamplingParams], list[dict[str, Any]]]:
    """Prompts, and for each its parameters and schema."""
    rng = random.Random(12)
    schemas = [random_schema(rng) for _ in SUBJECTS]
    params = [
        SamplingParams(
            structure=Structure("json_schema", json.dumps(schema)),
            temperature=(0.0, 0.7, 1.5, 1.0)[number % 4],
            seed=number,
            max_tokens=150,
            logprobs=0,
        )
        for number, schema in enumerate(schemas)
    ]
    return [PROMPT.format(subject) for subject in SUBJECTS], params, schemas


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", speculate="suffix+ngram", draft_tokens=6, max_batch=8, num_threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[Completion]:
    """In one batch, without drafts."""
    prompts, params, _ = cases()
    with llm.without_drafts():
        return llm.generate(prompts, params)


def test_answers_are_valid(answers: list[Completion]) -> None:
    _, _, schemas = cases()
    for answer, schema in zip(answers, schemas, strict=True):
        assert answer.finish_reason == "stop", answer.text
        jsonschema.validate(json.loads(answer.text), schema, cls=jsonschema.Draft202012Validator)


def test_drafts_and_company_change_nothing(llm: LLM, answers: list[Completion]) -> None:
    prompts, params, _ = cases()
    alone = [llm.generate(prompt, one) for prompt, one in zip(prompts[:4], params, strict=False)]
    together = llm.generate(prompts, params)
    for answer, other in [*zip(alone, answers, strict=False), *zip(together, answers, strict=True)]:
        assert answer.token_ids == other.token_ids
        assert answer.logprobs == other.logprobs
        assert answer.finish_reason == other.finish_reason
    assert sum(answer.speculation.accepted for answer in together if answer.speculation) > 0


def test_a_structure_changes_what_the_model_says(llm: LLM, answers: list[Completion]) -> None:
    """Else the tests above would prove nothing of masks."""
    prompts, params, schemas = cases()
    free = llm.generate(prompts, [replace(one, structure=None, max_tokens=30) for one in params])
    assert not any(_is_valid(answer.text, schema) for answer, schema in zip(free, schemas, strict=True))


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
