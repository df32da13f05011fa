"""Graphs of everything that dense families ask of an executor, in the arrangements of norms that there are, as families
of their own: what a real family combines, single tests vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.config import ModelConfig, RopeConfig, RopeScaling
from paceline.models.family import Family
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph, Value


def build(config: ModelConfig, *, pre: bool = True, post: Sequence[str] = (), whole_norms: bool = False) -> Graph:
    """A decoder with a norm before each block (``pre``), one on what the blocks in ``post`` add, and norms of queries
    and keys over all heads at once (``whole_norms``) or, with ``config.qk_norm``, over each.
    """
    g, eps = GraphBuilder(), config.rms_norm_eps
    x = g.embed(
        "token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size, scale=config.embedding_scale
    )
    for layer in range(config.num_layers):
        p = f"blk.{layer}"
        h = g.rms_norm(x, f"{p}.attn_norm.weight", eps=eps) if pre else x
        y = _attention(g, h, config, layer, whole_norms=whole_norms)
        x = g.add(x, g.rms_norm(y, f"{p}.post_attention_norm.weight", eps=eps) if "attention" in post else y)
        h = g.rms_norm(x, f"{p}.ffn_norm.weight", eps=eps) if pre else x
        y = _feed_forward(g, h, config, layer)
        x = g.add(x, g.rms_norm(y, f"{p}.post_ffw_norm.weight", eps=eps) if "ffn" in post else y)
    x = g.rms_norm(g.select_outputs(x), "output_norm.weight", eps=eps)
    head = "token_embd.weight" if config.tie_embeddings else "output.weight"
    (logits,) = g.linear(x, [(head, config.vocab_size)], role="head", scale=config.logit_scale)
    return g.finish(logits if config.logit_softcap is None else g.softcap(logits, cap=config.logit_softcap))


def _attention(g: GraphBuilder, x: Value, config: ModelConfig, layer: int, *, whole_norms: bool) -> Value:
    p, eps = f"blk.{layer}", config.rms_norm_eps
    sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    q, k, v = g.linear(
        x,
        [(f"{p}.attn_{part}.weight", size) for part, size in sizes.items()],
        biases=[f"{p}.attn_{part}.bias" for part in sizes] if config.attention_bias else [],
        rope_heads=[config.num_heads, config.num_kv_heads, 0],
    )
    norms = {}
    if whole_norms:
        q = g.rms_norm(q, f"{p}.attn_q_norm.weight", eps=eps, rope_heads=config.num_heads)
        k = g.rms_norm(k, f"{p}.attn_k_norm.weight", eps=eps, rope_heads=config.num_kv_heads)
    elif config.qk_norm:
        norms = {f"{part}_norm": g.head_norm_weight(f"{p}.attn_{part}_norm.weight", config.head_dim) for part in "qk"}
    q = g.rope_write(q, k, v, layer=layer, rope=config.rope_of(layer), scale=config.query_scale, eps=eps, **norms)
    sinks = g.vector(f"{p}.attn_sinks.weight", config.num_heads) if config.attention_sinks else None
    y = g.attention(q, layer=layer, window=config.window_of(layer), softcap=config.attention_softcap, sinks=sinks)
    biases = [f"{p}.attn_output.bias"] if config.output_bias else []
    (out,) = g.linear(y, [(f"{p}.attn_output.weight", config.hidden_size)], biases=biases, scale=config.residual_scale)
    return out


def _feed_forward(g: GraphBuilder, x: Value, config: ModelConfig, layer: int) -> Value:
    p, width = f"blk.{layer}", config.intermediate_size
    gate, up = g.linear(x, [(f"{p}.ffn_gate.weight", width), (f"{p}.ffn_up.weight", width)])
    h = g.glu(gate, up, activation=config.activation)
    (out,) = g.linear(h, [(f"{p}.ffn_down.weight", config.hidden_size)], scale=config.residual_scale)
    return out


def _family(name: str, **arrangement: Any) -> Family:
    return Family(name, partial(build, **arrangement), {}, None)


FAMILIES = (
    _family("pre"),
    _family("sandwich", post=("attention", "ffn")),
    _family("half", post=("attention",)),
    _family("post", pre=False, post=("attention", "ffn"), whole_norms=True),
)
_LOCAL = RopeConfig(500.0, 16, RopeScaling("linear", factor=4.0))
_STRETCHED = RopeConfig(10000.0, 8, RopeScaling("yarn", factor=4.0, original_context=64, attention_factor=1.3))

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "architecture": "sandwich",
        "activation": "gelu_tanh",
        "qk_norm": True,
        "sliding_window": 40,
        "windowed_layers": (True, False),
        "local_rope": _LOCAL,
        "embedding_scale": 8.0,
        "attention_scale": 0.3,
        "attention_softcap": 2.5,
        "logit_softcap": 3.0,
    },
    "granite": {
        "architecture": "pre",
        "embedding_scale": 1.7,
        "residual_scale": 0.22,
        "logit_scale": 0.3,
        "attention_scale": 0.07,
        "output_bias": True,
        "attention_bias": True,
    },
    "olmo": {"architecture": "post", "num_heads": 3, "num_kv_heads": 1, "unrotated_layers": (1,)},
    "half": {"architecture": "half", "num_layers": 3},
    "oss": {
        "architecture": "pre",
        "activation": "swiglu_oai",
        "attention_sinks": True,
        "sliding_window": 60,
        "windowed_layers": (False, True),
        "rope": _STRETCHED,
        "output_bias": True,
    },
}
"""Name -> what of a tiny configuration is changed. Every attribute that a node may have differs from its usual value in
one of them, and every place where a norm may stand is there."""
