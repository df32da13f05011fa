"""Configurations of mixtures of experts: what releases say, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import Experts
from paceline.errors import CheckpointError, PacelineError, UnsupportedError
from paceline.models.registry import config_from_json, config_from_metadata

PATH = Path("config.json")
MIXTRAL = {
    # Mixtral-8x7B-v0.1's own file.
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3 = {
    # Qwen3-30B-A3B's own file.
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS = {
    # gpt-oss-20b's own file, with four layers.
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_what_releases_say() -> None:
    mixtral, qwen3, gpt_oss = (config_from_json(PATH, values) for values in (MIXTRAL, QWEN3, GPT_OSS))
    assert mixtral.experts == Experts(8, 2, 14336)
    assert mixtral.sliding_window is None
    assert qwen3.experts == Experts(128, 8, 768)
    assert (qwen3.qk_norm, qwen3.attention_bias, qwen3.output_bias) == (True, False, False)
    assert gpt_oss.experts == Experts(32, 4, 2880, biases=True)
    assert [gpt_oss.window_of(layer) for layer in range(4)] == [128, None, 128, None]
    assert (gpt_oss.attention_sinks, gpt_oss.attention_bias, gpt_oss.output_bias) == (True, True, True)
    scaling = gpt_oss.rope.scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_context, scaling.truncate) == (32.0, 4096, False)
    assert gpt_oss.rope.attention_factor == pytest.approx(1.3465735902799727)


def test_what_classes_take_for_absent_keys() -> None:
    """The defaults of GptOssConfig, MixtralConfig and Qwen3MoeConfig."""
    kept = {
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    }

    def bare(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key in kept}

    found = config_from_json(PATH, bare(GPT_OSS))
    assert found.experts == Experts(128, 4, 2880, biases=True)
    assert found == config_from_json(PATH, GPT_OSS | {"num_local_experts": 128})
    found = config_from_json(PATH, bare(MIXTRAL))
    assert found == config_from_json(PATH, MIXTRAL | {"max_position_embeddings": 131072})
    found = config_from_json(PATH, bare(QWEN3))
    assert found.experts == Experts(128, 8, 768, normalise=False)
    assert (found.num_kv_heads, found.head_dim, found.context_length, found.sliding_window) == (4, 64, 32768, None)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1, 2, 4)),
        ({"decoder_sparse_step": None, "mlp_only_layers": None}, ()),
    ],
)
def test_layers_without_experts(changes: dict[str, Any], dense: tuple[int, ...]) -> None:
    config = config_from_json(PATH, QWEN3 | {"num_hidden_layers": 6} | changes)
    assert config.experts is not None
    assert config.experts.dense_layers == dense
    assert [layer for layer in range(6) if config.experts_of(layer) is None] == list(dense)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok is 9 of num_local_experts 8"),
        (MIXTRAL | {"num_local_experts": 0}, CheckpointError, "num_local_experts is 0"),
        (MIXTRAL | {"hidden_act": "relu"}, UnsupportedError, "hidden_act 'relu'"),
        (MIXTRAL | {"architectures": ["LlamaForCausalLM"]}, UnsupportedError, "num_local_experts: a mixture of 8"),
        (QWEN3 | {"mlp_only_layers": "all"}, CheckpointError, "mlp_only_layers is 'all'"),
        (QWEN3 | {"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step is 0"),
        (QWEN3 | {"norm_topk_prob": 1}, CheckpointError, "norm_topk_prob is 1"),
        (QWEN3 | {"moe_intermediate_size": "x"}, CheckpointError, "moe_intermediate_size is 'x'"),
        (GPT_OSS | {"swiglu_limit": 6.0}, UnsupportedError, "swiglu_limit is 6.0; Paceline has 7.0"),
        (GPT_OSS | {"swiglu_alpha": 2}, UnsupportedError, "swiglu_alpha is 2; Paceline has 1.702"),
        (GPT_OSS | {"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu'"),
        (GPT_OSS | {"layer_types": ["chunked_attention"] * 4}, UnsupportedError, "layer_types: chunked_attention"),
        (
            GPT_OSS | {"layer_types": ["full_attention"]},
            CheckpointError,
            "layer_types names 1 layers, num_hidden_layers is 4",
        ),
        (GPT_OSS | {"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedError, "rope_type 'dynamic'"),
        (
            GPT_OSS | {"rope_scaling": GPT_OSS["rope_scaling"] | {"beta_slow": 40}},  # type: ignore[operator]
            CheckpointError,
            "beta_slow 40.0 must be below beta_fast 32.0",
        ),
    ],
)
def test_errors_name_the_key(values: dict[str, Any], error: type[PacelineError], words: str) -> None:
    with pytest.raises(error, match=words):
        config_from_json(PATH, values)


# ---- GGUF ----


def metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    """Of a small model; a change to None removes the key, names take "." for "__"."""
    keys: dict[str, Any] = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128 if architecture == "gpt-oss" else None,
        "expert_count": 8,
        "expert_used_count": 2,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    named = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, **named}


def config_of(values: dict[str, Any], *names: str) -> Any:
    shapes = dict.fromkeys(names, (64,)) | {"token_embd.weight": (75, 64), "output.weight": (75, 64)}
    return config_from_metadata(PATH, values, shapes, rope_vectors={})


def test_experts_of_gguf_files() -> None:
    assert config_of(metadata("llama")).architecture == "mixtral"
    assert config_of(metadata("llama")).experts == Experts(8, 2, 96)
    assert config_of(metadata("llama", expert_count=None)).architecture == "llama"
    assert config_of(metadata("qwen3moe", expert_feed_forward_length=48)).experts == Experts(8, 2, 48)
    assert not config_of(metadata("qwen3moe", expert_weights_norm=False)).experts.normalise
    found = config_of(metadata("gpt-oss"), "blk.0.attn_q.bias")
    assert found.windowed_layers == (True, False)
    assert (found.activation, found.attention_sinks, found.output_bias) == ("swiglu_oai", True, True)
    assert found.experts == Experts(8, 2, 96, biases=True)
    pattern = metadata("gpt-oss", attention__sliding_window_pattern=np.array([False, True]))
    assert config_of(pattern).windowed_layers == (False, True)


def test_yarn_of_gguf_files() -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__freq_base": 150000.0}
    scaling = config_of(metadata("qwen3moe", **keys)).rope.scaling
    assert (scaling.kind, scaling.factor, scaling.original_context, scaling.truncate) == ("yarn", 4.0, 4096, True)
    assert scaling.attention_factor == pytest.approx(1.1386294)
    more = {"rope__scaling__original_context_length": 1024, "rope__scaling__yarn_attn_factor": 1.5}
    scaling = config_of(metadata("gpt-oss", **keys, **more)).rope.scaling
    assert (scaling.original_context, scaling.attention_factor, scaling.truncate) == (1024, 1.5, False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (metadata("qwen3moe", expert_gating_func=2), "expert_gating_func 2"),
        (metadata("qwen3moe", expert_shared_count=1), "expert_shared_count"),
        (metadata("qwen3moe", expert_group_count=4), "expert_group_count"),
        (metadata("qwen3moe", expert_weights_scale=2.5), "expert_weights_scale 2.5"),
        (metadata("qwen3moe", expert_used_count=9), "expert_used_count is 9 of expert_count 8"),
        (metadata("qwen3moe", expert_count=None), "metadata lacks qwen3moe.expert_count"),
        (metadata("qwen3", expert_count=4), "expert_count: a mixture of 4 experts"),
        (metadata("gpt-oss", attention__sliding_window_pattern=np.ones(3, bool)), "pattern names 3 layers of 2"),
        (metadata("qwen3moe", rope__scaling__type="ntk"), "rope.scaling.type 'ntk'"),
        (metadata("qwen3moe", rope__scaling__type="yarn", rope__scaling__attn_factor=1.2), "attn_factor is 1.2"),
    ],
)
def test_what_gguf_files_may_not_say(values: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        config_of(values)


def test_files_with_a_tensor_for_each_expert_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_gate\.0\.weight: .*convert the model again"):
        config_of(metadata("llama"), "blk.0.ffn_gate.0.weight")
