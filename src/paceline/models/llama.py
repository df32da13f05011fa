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
    x = embeddings(g, config)
    for layer in range(config.num_layers):
        x = g.add(x, attention_block(g, x, config, layer))
        if config.experts_of(layer) is None:
            x = g.add(x, feed_forward_block(g, x, config, layer))
        else:
            x = g.add(x, experts.block(g, x, config, layer, norm=ffn_norm))
    return finish(g, x, config)


def embeddings(g: GraphBuilder, config: ModelConfig) -> Value:
    """What the residual stream begins with."""
    return g.embed(
        "token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size, scale=config.embedding_scale
    )


def finish(g: GraphBuilder, x: Value, config: ModelConfig) -> Graph:
    """Output rows, norm and head."""
    x = g.select_outputs(x)
    x = g.rms_norm(x, "output_norm.weight", eps=config.rms_norm_eps)
    head = "token_embd.weight" if config.tie_embeddings else "output.weight"
    (logits,) = g.linear(x, [(head, config.vocab_size)], role="head", scale=config.logit_scale)
    return g.finish(logits if config.logit_softcap is None else g.softcap(logits, cap=config.logit_softcap))


def attention_block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    """Norm, query/key/value, rotation, attention, output projection."""
    p, rope, scale = f"blk.{layer}", config.rope_of(layer), config.query_scale
    h = g.rms_norm(x, f"{p}.attn_norm.weight", eps=config.rms_norm_eps)
    q, k, v = heads(g, h, config, layer)
    if config.qk_norm:
        q_norm = g.head_norm_weight(f"{p}.attn_q_norm.weight", config.head_dim)
        k_norm = g.head_norm_weight(f"{p}.attn_k_norm.weight", config.head_dim)
        q = g.rope_write(
            q, k, v, layer=layer, rope=rope, scale=scale, q_norm=q_norm, k_norm=k_norm, eps=config.rms_norm_eps
        )
    else:
        q = g.rope_write(q, k, v, layer=layer, rope=rope, scale=scale)
    return attend(g, q, config, layer)


def heads(g: GraphBuilder, h: Value, config: ModelConfig, layer: int) -> tuple[Value, ...]:
    """Queries, keys and values."""
    p = f"blk.{layer}"
    return g.linear(
        h,
        [
            (f"{p}.attn_q.weight", config.q_size),
            (f"{p}.attn_k.weight", config.kv_size),
            (f"{p}.attn_v.weight", config.kv_size),
        ],
        biases=[f"{p}.attn_q.bias", f"{p}.attn_k.bias", f"{p}.attn_v.bias"] if config.attention_bias else [],
        rope_heads=[config.num_heads, config.num_kv_heads, 0],
    )


def attend(g: GraphBuilder, q: Value, config: ModelConfig, layer: int) -> Value:
    """Attention and its output projection, times what the residual stream is added."""
    p = f"blk.{layer}"
    sinks = g.vector(f"{p}.attn_sinks.weight", config.num_heads) if config.attention_sinks else None
    y = g.attention(q, layer=layer, window=config.window_of(layer), softcap=config.attention_softcap, sinks=sinks)
    (out,) = g.linear(
        y,
        [(f"{p}.attn_output.weight", config.hidden_size)],
        biases=[f"{p}.attn_output.bias"] if config.output_bias else [],
        scale=config.residual_scale,
    )
    return out


def feed_forward_block(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    """Norm, gate and up, their product, down."""
    return feed_forward(g, g.rms_norm(x, f"blk.{layer}.ffn_norm.weight", eps=config.rms_norm_eps), config, layer)


def feed_forward(g: GraphBuilder, h: Value, config: ModelConfig, layer: int) -> Value:
    """Gate and up, their product, down."""
    p = f"blk.{layer}"
    gate, up = g.linear(
        h, [(f"{p}.ffn_gate.weight", config.intermediate_size), (f"{p}.ffn_up.weight", config.intermediate_size)]
    )
    h = g.glu(gate, up, activation=config.activation)
    (out,) = g.linear(h, [(f"{p}.ffn_down.weight", config.hidden_size)], scale=config.residual_scale)
    return out


def _llama_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=2048)
    return huggingface_keys.dense_config(keys, "llama", attention_bias=keys.flag("attention_bias"))


def _mistral_config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    windowed = set(huggingface_keys.windowed_layers(keys, (True,)))
    window = None
    if keys.get("sliding_window") is not None and windowed != {False}:
        if windowed != {True}:
            raise UnsupportedError(f"{keys.path}: layer_types: layers of different attention; Mistral has one kind")
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
