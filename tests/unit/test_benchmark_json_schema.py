"""The conformance report: what it counts, and that it would tell of an answer that must not be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import json_schema

SUITE: list[dict[str, Any]] = [
    {
        "file": "type.json",
        "description": "integers",
        "schema": {"type": "integer"},
        "tests": [
            {"description": "one", "data": 1, "valid": True},
            {"description": "half", "data": 0.5, "valid": False},
            {"description": "one, as a float", "data": 1.0, "valid": True},
        ],
    },
    {"file": "not.json", "description": "not", "schema": {"not": {}, "contains": {}}, "tests": []},
]


def test_each_instance_is_counted_where_it_belongs() -> None:
    report = json_schema.judge(SUITE)
    document = json.loads(json.dumps(report.document()))
    assert {name: document[name] for name in ("schemas", "refused", "valid_accepted", "valid_rejected")} == {
        "schemas": 2,
        "refused": 1,
        "valid_accepted": 1,
        "valid_rejected": 1,
    }
    assert (document["invalid_rejected"], document["invalid_accepted"]) == (1, 0)
    assert document["refusals"] == {"the keyword not": 1, "the keyword contains": 1}
    assert "type.json: integers: one, as a float" in "\n".join(report.lines())


def test_an_answer_that_must_not_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "accepts", lambda grammar, value: True)
    report = json_schema.judge(SUITE)
    assert report.total.invalid_accepted == 1
    assert report.invalid_accepted == ["type.json: integers: half"]
    assert "INVALID, and can be an answer:" in "\n".join(report.lines())
