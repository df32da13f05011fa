"""Mixtral: Llama's graph with experts in place of its feed-forward networks (Jiang et al. 2401.04088).

GGUF files call it "llama"; what they hold beyond that is experts, so ``llama.py`` reads their metadata.
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.models import experts, huggingface_keys, llama
from paceline.models.family import BLOCK_NAMES, Family
from paceline.models.huggingface_keys import HuggingFaceKeys


def _config(keys: HuggingFaceKeys) -> ModelConfig:
    keys = keys.with_defaults(
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return huggingface_keys.dense_config(
        keys,
        "mixtral",
        sliding_window=None if keys.get("sliding_window") is None else keys.integer("sliding_window"),
        experts=huggingface_keys.experts(keys, width="intermediate_size"),
    )


FAMILY = Family(
    "mixtral",
    llama.build,
    {"MixtralForCausalLM": _config},
    None,
    block_names={**BLOCK_NAMES, "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp"},
    interleaved_gguf=True,
    expert_sources=experts.sources(*(f"block_sparse_moe.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2"))),
)
