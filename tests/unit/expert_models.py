"""A tiny model whose feed-forward networks are mixtures of experts, as a family of its own: what the executors make of
the ops, whatever real families make of files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiny_models import tiny_config

from paceline.config import Experts, ModelConfig
from paceline.models.family import Family
from paceline.models.llama import attention_block
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value


def expert_config(*, experts: Experts | None = None, **changes: Any) -> ModelConfig:
    """Six experts of 64, three of them chosen."""
    mixture = experts or Experts(num_experts=6, num_chosen=3, width=64)
    return replace(tiny_config(**changes), architecture=FAMILY.architecture, experts=mixture)


def _build(config: ModelConfig) -> Graph:
    g = GraphBuilder()
    x = g.embed("token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size)
    for layer in range(config.num_layers):
        x = g.add(x, attention_block(g, x, config, layer))
        x = g.add(x, _expert_block(g, x, config, layer))
    x = g.rms_norm(g.select_outputs(x), "output_norm.weight", eps=config.rms_norm_eps)
    (logits,) = g.linear(x, [("token_embd.weight", config.vocab_size)], role="head")
    return g.finish(logits)


def _expert_block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    experts, p = config.experts, f"blk.{layer}"
    assert experts is not None
    count = experts.num_experts

    def biases(*names: str) -> tuple[str, ...]:
        return tuple(f"{p}.ffn_{name}.bias" for name in names) if experts.biases else ()

    h = g.rms_norm(x, f"{p}.ffn_norm.weight", eps=config.rms_norm_eps)
    router = (f"{p}.ffn_gate_inp.weight", count)
    (scores,) = g.linear(h, [router], biases=biases("gate_inp"), role="router")
    routing = g.route(scores, num_chosen=experts.num_chosen, normalise=experts.normalise)
    gate_up = (f"{p}.ffn_gate_exps.weight", f"{p}.ffn_up_exps.weight")
    h = g.experts_glu(
        h,
        routing,
        gate_up,
        num_experts=count,
        width=experts.width,
        activation=config.activation,
        biases=biases("gate_exps", "up_exps") or None,  # type: ignore[arg-type]
    )
    down = f"{p}.ffn_down_exps.weight"
    (bias,) = biases("down_exps") or (None,)
    return g.experts_down(h, routing, down, num_experts=count, outputs=config.hidden_size, bias=bias)


FAMILY = Family("tiny-experts", _build, {}, None)
