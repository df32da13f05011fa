"""Which file builds which architecture."""

from __future__ import annotations

from collections.abc import Callable

from paceline.config import ModelConfig
from paceline.errors import UnsupportedError
from paceline.models import eagle, llama, qwen
from paceline.ops.graph import Graph

BUILDERS: dict[str, Callable[[ModelConfig], Graph]] = {
    "eagle": eagle.build,
    "llama": llama.build,
    "qwen2": qwen.build_qwen2,
    "qwen3": qwen.build_qwen3,
}


def build_graph(config: ModelConfig) -> Graph:
    """The graph of the configured model, or UnsupportedError naming the architectures that exist."""
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        raise UnsupportedError(
            f"architecture {config.architecture!r} is not built; known are {', '.join(sorted(BUILDERS))}"
        )
    return builder(config)
