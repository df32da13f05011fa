"""Configurations that cannot be are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.errors import ParameterError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "int3"),
        ("head_bits", "f16"),
        ("kv_dtype", "int4"),
        ("context_length", 0),
        ("kv_memory_bytes", -1),
        ("num_threads", 0),
        ("num_threads", 100_000),
        ("max_batch", 0),
        ("token_budget", 10_000),
    ],
)
def test_an_impossible_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**{field: value})
    assert caught.value.field == field
    assert caught.value.value == value


def test_a_head_format_by_name() -> None:
    config = EngineConfig(weights="int4")
    assert config.weights_of("blk.0.ffn_up.weight", tied_embeddings=True) == "int4"
    assert config.weights_of("token_embd.weight", tied_embeddings=True) == "int8"
    assert config.weights_of("token_embd.weight", tied_embeddings=False) == "native"
    assert EngineConfig(weights="int4", head_bits="bf16").weights_of("output.weight", tied_embeddings=False) == "bf16"
