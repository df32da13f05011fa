"""What there is to know of a family of models: one such record in each family's file, listed in ``registry.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.config import ModelConfig
from paceline.models.gguf_keys import GGUFKeys
from paceline.models.huggingface_keys import HuggingFaceKeys
from paceline.ops.graph import Graph

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Module of a layer in Transformers -> in GGUF, for Llama and whatever is called as its modules are."""


def _same(name: str) -> str | None:
    return name


@dataclass(frozen=True)
class ExpertSource:
    """Where safetensors hold one matrix (or bias) of all experts of a layer.

    ``name`` of the tensor in its layer: with "{}" there is one for each expert, else one for all. ``rows``: which of
    its outputs are meant, where gate and up are one tensor. ``transposed``: inputs stand before outputs. Of the same
    name with "_blocks" and "_scales" it is MXFP4, not transposed.
    """

    name: str
    rows: Literal["all", "first half", "second half", "even", "odd"] = "all"
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture: its graph, and how files describe it.

    ``architecture`` is GGUF's name of it and ours. ``classes``: class of Transformers -> what reads its config.json;
    ``from_gguf`` reads the metadata of a GGUF file (None: no such files). ``block_names``: module of a layer in
    Transformers -> in GGUF. ``interleaved_gguf``: GGUF files store the rows of q and k such that rotary pairs are
    neighbours. ``norm_offset`` is added to the weights of norms in safetensors; GGUF files hold the sum. ``text_name``:
    name of a tensor in safetensors -> in a model of text alone, None for a tensor that text does not need.
    ``tensor_names``: tensor of a layer that is neither called weight nor bias -> in GGUF; ``expert_sources``: tensor of
    a layer in GGUF -> where safetensors may hold it, of which the first that is there counts. ``fused``: module of a
    layer that files may hold as one matrix -> the modules whose rows these are, in order; all names are GGUF's.
    """

    architecture: str
    build: Callable[[ModelConfig], Graph]
    classes: Mapping[str, Callable[[HuggingFaceKeys], ModelConfig]]
    from_gguf: Callable[[GGUFKeys], ModelConfig] | None
    block_names: Mapping[str, str] = field(default_factory=lambda: BLOCK_NAMES)
    interleaved_gguf: bool = False
    norm_offset: float = 0.0
    text_name: Callable[[str], str | None] = _same
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    expert_sources: Mapping[str, tuple[ExpertSource, ...]] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
