"""Llama: pre-norm decoder with rotary attention and a gated SiLU network (Touvron et al. 2302.13971).

Also Llama 3.x, SmolLM2, TinyLlama and Mistral, which differ in their configuration only: RoPE scaling, grouped heads,
sliding window.
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.errors import UnsupportedError
from paceline.models import experts, gguf_keys, huggingface_keys
from paceline.models.family import Family
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value


def build(config: ModelConfig, *, ffn_norm: str = "ffn_norm") -> Graph:
    """The graph of a step, from tokens to logits; ``ffn_norm`` is the name of the norm before the network."""
    g = GraphBuilder()
    x = g.embed("token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size)
    for layer in range(config.num_layers):
        x = g.add(x, attention_block(g, x, config, layer))
        if config.experts_of(layer) is None:
            x = g.add(x, feed_forward_block(g, x, config, layer))
        else:
            x = g.add(x, experts.block(g, x, config, layer, norm=ffn_norm))
    x = g.select_outputs(x)
    x = g.rms_norm(x, "output_norm.weight", eps=config.rms_norm_eps)
    head = "token_embd.weight" if config.tie_embeddings else "output.weight"
    (logits,) = g.linear(x, [(head, config.vocab_size)], role="head")
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
    rope, scale = config.rope_of(layer), config.query_scale
    if config.qk_norm:
        q_norm = g.head_norm_weight(f"{p}.attn_q_norm.weight", config.head_dim)
        k_norm = g.head_norm_weight(f"{p}.attn_k_norm.weight", config.head_dim)
        q = g.rope_write(
            q, k, v, layer=layer, rope=rope, scale=scale, q_norm=q_norm, k_norm=k_norm, eps=config.rms_norm_eps
        )
    else:
        q = g.rope_write(q, k, v, layer=layer, rope=rope, scale=scale)
    sinks = g.vector(f"{p}.attn_sinks.weight", config.num_heads) if config.attention_sinks else None
    y = g.attention(q, layer=layer, window=config.window_of(layer), softcap=config.attention_softcap, sinks=sinks)
    (out,) = g.linear(
        y,
        [(f"{p}.attn_output.weight", config.hidden_size)],
        biases=[f"{p}.attn_output.bias"] if config.output_bias else [],
    )
    return out


def feed_forward_block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    """Norm, gate and up, SiLU, down."""
    p = f"blk.{layer}"
    h = g.rms_norm(x, f"{p}.ffn_norm.weight", eps=config.rms_norm_eps)
    gate, up = g.linear(
        h, [(f"{p}.ffn_gate.weight", config.intermediate_size), (f"{p}.ffn_up.weight", config.intermediate_size)]
    )
    h = g.glu(gate, up, activation=config.activation)
    (out,) = g.linear(h, [(f"{p}.ffn_down.weight", config.hidden_size)])
    return out


def _llama_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=2048)
    return huggingface_keys.dense_config(keys, "llama", attention_bias=keys.flag("attention_bias"))


def _mistral_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    kinds = set(huggingface_keys.layer_types(keys)) or {"sliding_attention"}
    window = None
    if keys.get("sliding_window") is not None and kinds != {"full_attention"}:
        if kinds != {"sliding_attention"}:
            raise UnsupportedError(
                f"{keys.path}: layer_types: layers of different attention ({', '.join(sorted(kinds))})"
            )
        window = keys.integer("sliding_window")
    return huggingface_keys.dense_config(
        keys, "llama", attention_bias=keys.flag("attention_bias"), sliding_window=window
    )


def _gguf_config(fields: GGUFKeys) -> ModelConfig:
    """Llama's, and Mixtral's, which GGUF calls the same."""
    if not fields.get("expert_count"):
        return gguf_keys.dense_config(fields)
    if "blk.0.ffn_gate.0.weight" in fields.shapes:
        raise UnsupportedError(
            f"{fields.path}: blk.0.ffn_gate.0.weight: a tensor for each expert, as llama.cpp wrote them before April "
            "2024; Paceline reads blk.0.ffn_gate_exps.weight: convert the model again"
        )
    return gguf_keys.dense_config(fields, architecture="mixtral", experts=gguf_keys.experts(fields))


FAMILY = Family(
    "llama",
    build,
    {"LlamaForCausalLM": _llama_config, "MistralForCausalLM": _mistral_config},
    _gguf_config,
    interleaved_gguf=True,
)
