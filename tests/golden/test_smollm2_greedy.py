"""The packaged SmolLM2 against Transformers on its dequantised weights: logits, and greedy tokens.

Three statements, each with the bound that its arithmetic allows:

- The reference executor with float activations computes what Transformers computes, but for keys and values in f16:
  a file read wrongly (rope order, scales, tied head) would show here.
- The native executor rounds activations to int8 in groups of 32. On plain text its distribution stays within a mean KL
  divergence of 0.004 of Transformers' (the project's bar; 0.003 is what the rounding itself costs).
- Greedy tokens are Transformers' own. Where one differs, Transformers must have been undecided: its margin between the
  two tokens is no larger than the margins that int8 activations moved on another text. From there on both are fed the
  token that Paceline chose, so that every later position is compared too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from real_models import TEXT, RealModel, check_greedy, divergence, margin_bound
from tiny_models import as_f32
from token_sequences import run_chunks, step_plan
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.executors.compare import compare_step
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import GGUFCheckpoint

NEW_TOKENS = 24
PROMPTS = [
    "<|im_start|>user\nExplain why the sky is blue in three sentences.<|im_end|>\n<|im_start|>assistant\n",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
]


@pytest.fixture(scope="module")
def model() -> RealModel:
    torch.set_num_threads(2)
    checkpoint = open_checkpoint(resolve_model("smollm2-135m", download=False))
    assert isinstance(checkpoint, GGUFCheckpoint)
    return RealModel(checkpoint, transformers_model)


def transformers_model(checkpoint: GGUFCheckpoint) -> LlamaForCausalLM:
    """Transformers' Llama with the values of the file, rows of q and k put back in Hugging Face's order."""
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    values = as_f32(checkpoint, checkpoint.names())
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads}

    def fill(parameter: torch.Tensor, value: NDArray[np.float32]) -> None:
        parameter.data.copy_(torch.from_numpy(value.copy()).reshape(parameter.shape))

    fill(model.model.embed_tokens.weight, values["token_embd.weight"])
    fill(model.model.norm.weight, values["output_norm.weight"])
    for i, layer in enumerate(model.model.layers):
        fill(layer.input_layernorm.weight, values[f"blk.{i}.attn_norm.weight"])
        fill(layer.post_attention_layernorm.weight, values[f"blk.{i}.ffn_norm.weight"])
        for module in (layer.self_attn, layer.mlp):
            for name, linear in module.named_children():
                if name not in names:
                    continue
                value = values[f"blk.{i}.{names[name]}.weight"]
                if name in heads:  # rows 2i and 2i + 1 of a head become rows i and i + dim / 2
                    value = value.reshape(heads[name], -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
                fill(linear.weight, value)
    model.tie_weights()
    rotary = model.model.rotary_emb  # its frequencies are no parameter, so they were not filled
    model.model.rotary_emb = type(rotary)(config=config)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    return model.eval()


def test_float_activations_give_the_logits_of_transformers(model: RealModel) -> None:
    """Keys and values in f16 err by 2^-11 each; through 30 layers that moved no logit by 0.02 (a standard deviation of
    the logits is 6), and the mean KL divergence is 3e-7.
    """
    text = model.tokens(TEXT)
    start = replace(text, tokens=text.tokens[:32])
    expected, found = model.expected_text[:32], run_chunks(model.reference, start, 32)
    assert np.abs(found - expected).max() < 0.05
    assert divergence(expected, found).mean() < 1e-5
    best = np.sort(expected, axis=1)
    decided = best[:, -1] - best[:, -2] > 2 * 0.05
    assert decided.sum() > 20
    assert np.array_equal(found.argmax(axis=1)[decided], expected.argmax(axis=1)[decided])


def test_int8_activations_stay_close_on_plain_text(model: RealModel) -> None:
    kl = divergence(model.expected_text, model.native_text)
    assert len(kl) > 100
    assert 1e-5 < kl.mean() <= 0.004  # above zero: the path really is the one that rounds


def test_greedy_tokens_are_those_of_transformers(model: RealModel) -> None:
    bound = margin_bound(model)
    assert 0.05 < bound < 1.0
    assert check_greedy(model, PROMPTS, NEW_TOKENS, bound) >= 0.9  # measured: 91 of 96


def test_nodes_of_the_real_model(model: RealModel) -> None:
    """Real weights have outliers that random ones lack."""
    model.reference._activations = "int8"
    try:
        plan = step_plan([model.tokens(PROMPTS[0]).part(0, 9)], outputs=[8])
        differences = compare_step(model.native, model.reference, plan)
    finally:
        model.reference._activations = "float"
    assert not [difference for difference in differences if not difference.bound_ratio <= 1]
