"""``MODEL:OPTIONS``: a model and the formats it is loaded in, so that one call compares several forms of one file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import KV_FORMATS, WEIGHT_FORMATS, EngineConfig
from paceline.errors import ParameterError

OPTIONS = {"weights": "weights", "head": "head_bits", "kv": "kv_dtype"}
"""Option -> field of ``EngineConfig``."""


@dataclass(frozen=True)
class ModelChoice:
    """``text`` is what was written, ``model`` what the catalog resolves, ``fields`` those of ``EngineConfig`` that the
    options name."""

    text: str
    model: str
    fields: dict[str, str] = field(default_factory=dict)

    def config(self, base: EngineConfig) -> EngineConfig:
        """``base`` with the options in place. Raises ``ParameterError`` for a format that does not exist."""
        return dataclasses.replace(base, **self.fields)  # type: ignore[arg-type]  # it checks them itself


def parse_choice(text: str) -> ModelChoice:
    """The choice that ``text`` writes: ``smollm2-135m``, ``smollm2-135m:int8``, ``out/model:head=int4,kv=int8``.

    Options follow the last colon, joined by commas: ``weights=``, ``head=`` and ``kv=``, or a format alone, which is
    that of the weights. What exists as a path is one, colons and all. Raises ``ParameterError``.
    """
    model, colon, options = text.rpartition(":")
    if not colon or Path(text).expanduser().exists() or not model or "/" in options or "\\" in options:
        return ModelChoice(text, text)
    fields: dict[str, str] = {}
    for option in options.split(","):
        name, equals, value = option.partition("=")
        if not equals:
            name, value = "weights", option
        formats: tuple[str, ...] = KV_FORMATS if name == "kv" else WEIGHT_FORMATS
        if name not in OPTIONS or value not in formats or OPTIONS[name] in fields:
            allowed = (
                f"after the colon each at most once: weights=FORMAT or FORMAT alone, head=FORMAT "
                f"({', '.join(WEIGHT_FORMATS)}), kv=FORMAT ({', '.join(KV_FORMATS)})"
            )
            raise ParameterError("model", text, allowed)
        fields[OPTIONS[name]] = value
    return ModelChoice(text, model, fields)
