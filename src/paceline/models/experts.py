"""The feed-forward network of a mixture of experts: a router, and the few networks that it chooses for each token
(Shazeer et al. 1701.06538).
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.models.family import ExpertSource
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Value


def block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int, *, norm: str = "ffn_norm") -> Value:
    """Norm, router, gate and up of the chosen experts, activation, down, weighted sum."""
    p, experts = f"blk.{layer}", config.experts_of(layer)
    assert experts is not None, f"layer {layer} has no experts"
    h = g.rms_norm(x, f"{p}.{norm}.weight", eps=config.rms_norm_eps)
    (logits,) = g.linear(
        h,
        [(f"{p}.ffn_gate_inp.weight", experts.num_experts)],
        biases=[f"{p}.ffn_gate_inp.bias"] if experts.biases else [],
        role="router",
    )
    routing = g.route(logits, num_chosen=experts.num_chosen, normalise=experts.normalise)
    h = g.experts_glu(
        h,
        routing,
        (f"{p}.ffn_gate_exps.weight", f"{p}.ffn_up_exps.weight"),
        num_experts=experts.num_experts,
        width=experts.width,
        activation=config.activation,
        biases=(f"{p}.ffn_gate_exps.bias", f"{p}.ffn_up_exps.bias") if experts.biases else None,
    )
    return g.experts_down(
        h,
        routing,
        f"{p}.ffn_down_exps.weight",
        num_experts=experts.num_experts,
        outputs=config.hidden_size,
        bias=f"{p}.ffn_down_exps.bias" if experts.biases else None,
    )


def sources(gate: str, up: str, down: str) -> dict[str, tuple[ExpertSource, ...]]:
    """Where safetensors hold the experts of a family: a tensor for each, of these names ("{}" is its number), or all in
    one as Transformers 5 has them in memory, gates before ups.
    """
    fused = "mlp.experts.gate_up_proj"
    return {
        "ffn_gate_exps.weight": (ExpertSource(gate), ExpertSource(fused, "first half")),
        "ffn_up_exps.weight": (ExpertSource(up), ExpertSource(fused, "second half")),
        "ffn_down_exps.weight": (ExpertSource(down), ExpertSource("mlp.experts.down_proj")),
    }
