"""Each key of each family's configuration with a value that it cannot have: an error that names file and key, or a
model that can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import ModelConfig
from paceline.errors import PacelineError
from paceline.models.registry import FAMILIES, build_graph, config_from_json, config_from_metadata

HUGE = 10**30
CLASSES = [name for family in FAMILIES for name in family.classes]
ARCHITECTURES = [family.architecture for family in FAMILIES if family.from_gguf is not None]
SHAPE: dict[str, Any] = {
    "vocab_size": 75,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": None,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
JSON_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 17, HUGE, 1.5, 1e300, 1e-320, math.nan, math.inf, "", "x"),
    *([], [1], [None] * 4, [[1]] * 4, ["x"] * 4, ["sliding_attention"], {}, {"a": 1}, {"type": None}),
    *({"rope_type": kind} for kind in ("linear", "llama3", "yarn", "longrope", "x", 5, [])),
    {"rope_type": "yarn", "factor": 1e300},
    {"rope_type": "yarn", "factor": 2, "beta_fast": math.nan},
    {"sliding_attention": 5},
    {"full_attention": {"rope_type": "x"}},
]
INNER_KEYS = ("rope_type", "factor", "short_factor", "low_freq_factor", "beta_fast")
"""What an error may name in place of the object that it is in."""


class Listening(dict[str, Any]):
    """Remembers which keys were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def json_values(name: str) -> dict[str, Any]:
    has_experts = any(part in name for part in ("Mixtral", "Moe", "GptOss"))
    values = {"architectures": [name], "use_sliding_window": True, "sliding_window": 8} | SHAPE
    values |= {"max_window_layers": 0} if name.startswith("Qwen") else {}
    return values | EXPERTS if has_experts else values


def read_json(values: dict[str, Any]) -> ModelConfig:
    (name,) = values["architectures"] if isinstance(values["architectures"], list) else ("",)
    if name == "Gemma3ForConditionalGeneration":
        values = {"architectures": [name], "text_config": values}
    return config_from_json(Path("config.json"), values)


def problem(config: ModelConfig) -> str:
    """What of a configuration could not be computed, nothing if all can."""
    build_graph(config)
    scales = ("embedding_scale", "residual_scale", "logit_scale", "query_scale", "rms_norm_eps")
    numbers = {name: getattr(config, name) for name in scales}
    ropes = [rope for layer in range(config.num_layers) if (rope := config.rope_of(layer)) is not None]
    numbers |= {f"rope {number}": rope.attention_factor for number, rope in enumerate(ropes)}
    wrong = [name for name, number in numbers.items() if not 0 < np.float32(number) < np.inf]
    if any(rope.dim != config.rope.dim for rope in ropes):  # rows of q and k have one order in all layers
        wrong.append("rope.dim")
    return ", ".join(wrong)


def failures(cases: Iterator[tuple[str, Any, Any]], words: tuple[str, ...]) -> Iterator[str]:
    """``cases``: a key, its value, and what reads the configuration with it."""
    for key, value, read in cases:
        try:
            if wrong := problem(read()):
                yield f"{key} = {value!r} makes {wrong}"
        except PacelineError as error:
            if not str(error).startswith(words[0]) or not any(word in str(error) for word in (key, *words[1:])):
                yield f"{key} = {value!r}: {error}"
        except Exception as error:  # what is being looked for
            yield f"{key} = {value!r}: {error!r}"


@pytest.mark.parametrize("name", CLASSES)
def test_config_json(name: str) -> None:
    listening = Listening(json_values(name.replace("ConditionalGeneration", "CausalLM")))
    read_json(listening)
    keys = listening.asked | {"rope_parameters", "rope_scaling", "rope_theta", "layer_types"} | SHAPE.keys()

    def cases() -> Iterator[tuple[str, Any, Any]]:
        for key in sorted(keys - {"architectures", "text_config"}):
            for value in JSON_VALUES:
                changed = json_values(name) | {key: value}
                yield key, value, lambda changed=changed: read_json(changed)

    assert len(keys) > 15
    assert list(failures(cases(), ("config.json", *INNER_KEYS))) == []


@pytest.mark.parametrize("value", [*JSON_VALUES, *([value] for value in JSON_VALUES)])
def test_architectures(value: Any) -> None:
    with pytest.raises(PacelineError, match=r"^config\.json: architectures"):
        config_from_json(Path("config.json"), SHAPE | {"architectures": value})


GGUF_VALUES: list[Any] = [
    *(True, False, 0, 1, -1, 17, 2**63, 1.5, 1e300, 1e-320, math.nan, math.inf, "", "x", [], ["a"], [np.ones(1)]),
    *(np.array(values) for values in ([], [1], [1, 2, 3, 4], [True, False, True, False], [1.5] * 4)),
]
ROTATIONS: dict[str, dict[str, Any]] = {
    "plain": {"rope.dimension_count": 8},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 32.0},
    "longrope": {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64},
}


def metadata(architecture: str, rotation: str, has_experts: bool) -> dict[str, Any]:
    keys = {
        "block_count": 4,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        **({"logit_scale": 4.0} if architecture == "granite" else {}),
        **({"expert_count": 8, "expert_used_count": 2} if has_experts else {}),
        **ROTATIONS[rotation],
    }
    return {"general.architecture": architecture, **{f"{architecture}.{key}": keys[key] for key in keys}}


def read_metadata(values: dict[str, Any], rotation: str) -> ModelConfig:
    shapes = {"token_embd.weight": (75, 64), "output.weight": (75, 64), "blk.0.attn_q.bias": (64,)}
    vectors = ("rope_factors_short.weight", "rope_factors_long.weight") if rotation == "longrope" else ()
    return config_from_metadata(Path("m.gguf"), values, shapes, rope_vectors=dict.fromkeys(vectors, (1.0,) * 8))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_metadata_of_gguf_files(name: str, rotation: str) -> None:
    has_experts = name in ("llama", "qwen3moe", "gpt-oss")
    listening = Listening(metadata(name, rotation, has_experts))
    assert problem(read_metadata(listening, rotation)) == ""

    def cases() -> Iterator[tuple[str, Any, Any]]:
        for key in sorted(listening.asked - {"general.architecture"}):
            for value in GGUF_VALUES:
                changed = metadata(name, rotation, has_experts) | {key: value}
                yield key.removeprefix(f"{name}."), value, lambda changed=changed: read_metadata(changed, rotation)

    assert len(listening.asked) > 15
    words = ("m.gguf", "rope_factors_short.weight") if rotation == "longrope" else ("m.gguf",)
    assert list(failures(cases(), words)) == []
