"""The file of ``paceline serve --config``: a model, ``[server]`` and ``[engine]`` in TOML."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.serve.settings import ServeSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Configuration:
    """What a file says: values of the fields of ``ServeSettings`` and of ``EngineConfig``."""

    model: str | None = None
    server: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def read_configuration(path: str, size: Callable[[str], int]) -> Configuration:
    """What the file says; fields that end in ``_bytes`` may be text that ``size`` understands.

    Raises ``ParameterError`` for what is no TOML, and for a name that nobody knows, with those that are known.
    """
    try:
        document = tomllib.loads(Path(path).read_text("utf-8"))
    except ValueError as error:  # of TOML, and of UTF-8
        raise ParameterError("config", path, f"a TOML file ({error})") from error
    _check_names("", document, ["model", "server", "engine"])
    model = document.get("model")
    if model is not None and not isinstance(model, str):
        raise ParameterError("model", model, "text")
    return Configuration(
        model, _table(document, "server", ServeSettings, size), _table(document, "engine", EngineConfig, size)
    )


def _table(document: Mapping[str, Any], name: str, of: type[Any], size: Callable[[str], int]) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ParameterError(name, table, f"a table: [{name}] and a line for each value")
    _check_names(f"{name}.", table, [known.name for known in fields(of)])
    return {key: _value(f"{name}.{key}", value, size) for key, value in table.items()}


def _value(name: str, value: Any, size: Callable[[str], int]) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if name.endswith("_bytes") and isinstance(value, str):
        try:
            return size(value)
        except Exception as error:
            raise ParameterError(name, value, "bytes, or a number with K, M or G") from error
    return value


def _check_names(prefix: str, table: Mapping[str, Any], known: list[str]) -> None:
    for name in table:
        if name not in known:
            raise ParameterError(f"{prefix}{name}", table[name], f"no such name; known are {', '.join(known)}")
