"""Qwen2 and Qwen2.5 (biases on query, key and value) and Qwen3 (a norm on each query and key head): Llama's graph
otherwise.

Source: the Qwen2 (2407.10671) and Qwen3 (2505.09388) reports. Both differences are switches of the shared attention
block, set here so that a configuration cannot ask for a mixture that no Qwen has.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import ModelConfig
from paceline.models import llama
from paceline.ops.graph import Graph


def build_qwen2(config: ModelConfig) -> Graph:
    """The graph of a Qwen2 or Qwen2.5 step."""
    return llama.build(replace(config, attention_bias=True, qk_norm=False))


def build_qwen3(config: ModelConfig) -> Graph:
    """The graph of a Qwen3 step."""
    return llama.build(replace(config, qk_norm=True))
