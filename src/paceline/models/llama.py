"""Llama: pre-norm decoder with rotary attention and a gated SiLU network (Touvron et al. 2302.13971).

Also Llama 3.x, SmolLM2, TinyLlama and Mistral, which differ in their configuration only: RoPE scaling, grouped heads,
sliding window.
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value


def build(config: ModelConfig) -> Graph:
    """The graph of a step, from tokens to logits."""
    g = GraphBuilder()
    x = g.embed("token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size)
    for layer in range(config.num_layers):
        x = g.add(x, attention_block(g, x, config, layer))
        x = g.add(x, feed_forward_block(g, x, config, layer))
    x = g.select_outputs(x)
    x = g.rms_norm(x, "output_norm.weight", eps=config.rms_norm_eps)
    head = "token_embd.weight" if config.tie_embeddings else "output.weight"
    (logits,) = g.linear(x, [(head, config.vocab_size)], head=True)
    return g.finish(logits)


def attention_block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    """Norm, query/key/value, rotation, attention, output projection."""
    p = f"blk.{layer}"
    h = g.rms_norm(x, f"{p}.attn_norm.weight", eps=config.rms_norm_eps)
    q, k, v = g.linear(
        h,
        [
            (f"{p}.attn_q.weight", config.q_size),
            (f"{p}.attn_k.weight", config.kv_size),
            (f"{p}.attn_v.weight", config.kv_size),
        ],
        biases=[f"{p}.attn_q.bias", f"{p}.attn_k.bias", f"{p}.attn_v.bias"] if config.attention_bias else [],
        rope_heads=[config.num_heads, config.num_kv_heads, 0],
    )
    if config.qk_norm:
        q_norm = g.head_norm_weight(f"{p}.attn_q_norm.weight", config.head_dim)
        k_norm = g.head_norm_weight(f"{p}.attn_k_norm.weight", config.head_dim)
        q = g.rope_write(q, k, v, layer=layer, q_norm=q_norm, k_norm=k_norm, eps=config.rms_norm_eps)
    else:
        q = g.rope_write(q, k, v, layer=layer)
    (out,) = g.linear(g.attention(q, layer=layer), [(f"{p}.attn_output.weight", config.hidden_size)])
    return out


def feed_forward_block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    """Norm, gate and up, SiLU, down."""
    p = f"blk.{layer}"
    h = g.rms_norm(x, f"{p}.ffn_norm.weight", eps=config.rms_norm_eps)
    gate, up = g.linear(
        h, [(f"{p}.ffn_gate.weight", config.intermediate_size), (f"{p}.ffn_up.weight", config.intermediate_size)]
    )
    (out,) = g.linear(g.silu_mul(gate, up), [(f"{p}.ffn_down.weight", config.hidden_size)])
    return out
