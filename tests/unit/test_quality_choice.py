"""MODEL:OPTIONS as people write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.measure.quality.choice import ModelChoice, parse_choice


@pytest.mark.parametrize(
    ("text", "model", "fields"),
    [
        ("smollm2-135m", "smollm2-135m", {}),
        ("smollm2-135m:int8", "smollm2-135m", {"weights": "int8"}),
        ("owner/name:weights=int4,head=bf16", "owner/name", {"weights": "int4", "head_bits": "bf16"}),
        ("a.gguf:kv=int8,int4", "a.gguf", {"kv_dtype": "int8", "weights": "int4"}),
        (r"C:\models\a.gguf", r"C:\models\a.gguf", {}),
        (r"C:\models\a.gguf:f32", r"C:\models\a.gguf", {"weights": "f32"}),
    ],
)
def test_choices(text: str, model: str, fields: dict[str, str]) -> None:
    assert parse_choice(text) == ModelChoice(text, model, fields)


def test_what_exists_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a:int8").mkdir()
    text = str(tmp_path / "a:int8")
    assert parse_choice(text) == ModelChoice(text, text)
    assert parse_choice(f"{text}:int4").fields == {"weights": "int4"}


@pytest.mark.parametrize("options", ["int5", "", "int8,int4", "kv=int4", "speed=9", "weights=", "kv=int8,kv=f16"])
def test_unknown_options_are_refused_with_the_known_ones(options: str) -> None:
    with pytest.raises(ParameterError, match=r"head=FORMAT .*int4.*kv=FORMAT .*bf16"):
        parse_choice(f"smollm2-135m:{options}")


def test_options_go_before_the_flags() -> None:
    base = EngineConfig(weights="int8", kv_dtype="bf16")
    assert parse_choice("x:int4").config(base) == EngineConfig(weights="int4", kv_dtype="bf16")
