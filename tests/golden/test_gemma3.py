"""The packaged Gemma-3-270M, where `paceline pull gemma3-270m` has brought it, against Transformers on its values.

The statements are those of test_smollm2_greedy.py. That Transformers reads the same values out of the file by itself
was compared once (`from_pretrained(gguf_file=...)`: every tensor equal); it needs packages that tests do without.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from real_models import TEXT, RealModel, check_greedy, divergence, margin_bound
from tiny_models import as_f32
from token_sequences import TokenSequence, engine_config, run_chunks, step_plan
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from paceline.executors.compare import compare_step
from paceline.executors.native import NativeExecutor
from paceline.measure.prompts import prompt_tokens
from paceline.models.gemma import GEMMA_BLOCK_NAMES
from paceline.weights.catalog import verify_cached
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import GGUFCheckpoint

MODEL = verify_cached("gemma3-270m")
pytestmark = pytest.mark.skipif(MODEL is None, reason="needs `paceline pull gemma3-270m` (238 MB)")

NEW_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "Albert Einstein was born in",
    "1, 2, 3, 4, 5,",
    "Q: What is the largest planet?\nA:",
    "In 1969, the first human",
    "To make an omelette, first",
    "안녕하세요. 저는",
    "서울은 대한민국의",
    "Die Hauptstadt von Deutschland ist",
    "La tour Eiffel se trouve à",
    "日本の首都は",
    "#include <stdio.h>\n\nint main(",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "Shakespeare wrote",
    "<h1>Welcome</h1>\n<p>",
]


@pytest.fixture(scope="module")
def model() -> RealModel:
    torch.set_num_threads(2)
    checkpoint = open_checkpoint(MODEL)  # type: ignore[arg-type]  # skipped without it
    assert isinstance(checkpoint, GGUFCheckpoint)
    return RealModel(checkpoint, transformers_model)


def transformers_model(checkpoint: GGUFCheckpoint) -> Gemma3ForCausalLM:
    """Transformers' Gemma 3 with the values of the file, norms without their one."""
    c = checkpoint.config
    assert c.local_rope is not None
    config = Gemma3TextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.rms_norm_eps,
        sliding_window=512,
        query_pre_attn_scalar=256,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn_implementation="eager",
    )
    model = Gemma3ForCausalLM(config)
    names = {ours: theirs for theirs, ours in GEMMA_BLOCK_NAMES.items()}
    state = model.state_dict()
    for name in checkpoint.names():
        values = as_f32(checkpoint, [name])[name]
        if name == "token_embd.weight":
            target = "model.embed_tokens.weight"
        elif name == "output_norm.weight":
            target = "model.norm.weight"
        else:
            _, layer, module, _ = name.split(".")
            target = f"model.layers.{layer}.{names[module]}.weight"
        values = values - np.float32(1) if name.endswith("norm.weight") else values
        with torch.no_grad():
            state[target].copy_(torch.from_numpy(values).reshape(state[target].shape))
    model.tie_weights()
    return model.eval()


def test_float_activations_give_the_logits_of_transformers(model: RealModel) -> None:
    """Keys and values in f16, and products of the k-quants' scales kept as f16: no logit moved by 0.04 (a standard
    deviation of the logits is 5), and the mean KL divergence is 3e-6.
    """
    text = model.tokens(TEXT)
    start = replace(text, tokens=text.tokens[:32])
    expected, found = model.expected_text[:32], run_chunks(model.reference, start, 32)
    assert np.abs(found - expected).max() < 0.1
    assert divergence(expected, found).mean() < 1e-5


def test_int8_activations_stay_close_on_plain_text(model: RealModel) -> None:
    kl = divergence(model.expected_text, model.native_text)
    assert len(kl) > 100
    assert 1e-5 < kl.mean() <= 0.004  # measured: 0.0030


def test_text_beyond_the_window(model: RealModel) -> None:
    """800 tokens, where windowed layers see 512 of them: as close as on a short text. (1,100 tokens of another text:
    0.0024, and 3.1 with a window that is too long.)
    """
    assert model.tokenizer.bos_token_id is not None
    ids = np.array([model.tokenizer.bos_token_id, *prompt_tokens(model.tokenizer, 799)], np.int32)
    sequence = TokenSequence(ids, np.arange(25, dtype=np.int32))
    executor = NativeExecutor.load(model.checkpoint, engine_config(model.checkpoint.config, num_pages=25))
    for begin in range(0, 800, 200):
        outputs = range(100, 200) if begin == 600 else (199,)
        executor.run(step_plan([sequence.part(begin, begin + 200)], outputs=outputs))
    with torch.no_grad():
        hidden = model.transformers.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0, 700:]
        expected = model.transformers.lm_head(hidden).numpy()
    assert divergence(expected, executor.logits()).mean() <= 0.004


def test_greedy_tokens_are_those_of_transformers(model: RealModel) -> None:
    bound = margin_bound(model)
    assert 0.05 < bound < 1.0  # measured: 0.44
    assert check_greedy(model, PROMPTS, NEW_TOKENS, bound) >= 0.9  # measured: 309 of 320


def test_nodes_of_the_real_model(model: RealModel) -> None:
    """Real weights have outliers that random ones lack."""
    model.reference._activations = "int8"
    try:
        plan = step_plan([model.tokens(PROMPTS[1]).part(0, 9)], outputs=[8])
        differences = compare_step(model.native, model.reference, plan)
    finally:
        model.reference._activations = "float"
    assert not [difference for difference in differences if not difference.bound_ratio <= 1]
