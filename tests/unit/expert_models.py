"""A tiny model whose feed-forward networks are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiny_models import tiny_config

from paceline.config import Experts, ModelConfig


def expert_config(*, experts: Experts | None = None, **changes: Any) -> ModelConfig:
    """Six experts of 64, three of them chosen, in Mixtral's graph."""
    mixture = experts or Experts(num_experts=6, num_chosen=3, width=64)
    return replace(tiny_config(**changes), architecture="mixtral", experts=mixture)
