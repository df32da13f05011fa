"""Logits of tiny random Hugging Face models of each family against Transformers, at every position of a prompt.

Two comparisons, so that neither needs a loose bound. The reference executor, its pages kept in float32, computes what
Transformers does in float32: only the order of sums differs. The native executor keeps keys and values as f16, so it is
compared with Transformers whose keys and values are rounded to f16 as well: again only the order of sums differs, but a
sum that falls on the other side of a rounding moves one key component by 2^-11 of its value.

Bounds, in units of the logits' root mean square: a sum of n products errs by at most n eps of the sum of magnitudes and
by about sqrt(n) eps in practice (Higham 2002, 3.1); with n <= 160 and some 20 of them in a row that is 3e-5, so FLOAT
is 1e-4 (measured: 1e-5). A flipped rounding moves one of 16 terms of a score, or one value, by 5e-4 of it, and a few
may add up in one row: F16_PAGES is 2e-3 (measured: 4e-4; 7e-3 where Transformers does not round). The negative tests
show that the smallest mistake costs more than SEEN = 50 times as much.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from token_sequences import TokenSequence, engine_config, random_sequences, run_chunks
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from paceline.config import ModelConfig, RopeConfig
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import Checkpoint, RawTensor, TensorHeader

FLOAT, F16_PAGES = 1e-4, 2e-3
SEEN = 50
NUM_TOKENS = 40
VOCAB = 301
WINDOW = 9
LLAMA3_ROPE = {
    # Wavelengths 6.3, 19.9, 63, ... against 32: one frequency is kept, one interpolated, the others are divided.
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Case:
    """A class of Transformers, what its configuration changes, and how it is saved."""

    model: type[PreTrainedModel]
    config: Callable[..., Any]
    changes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"


def llama(**changes: Any) -> Case:
    return Case(LlamaForCausalLM, LlamaConfig, changes)


CASES = {
    "llama": llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama-tied-bf16": replace(llama(tie_word_embeddings=True, num_hidden_layers=3), dtype=torch.bfloat16),
    "llama-mha-wide": llama(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, head_dim=32),
    "llama-mqa-sharded": replace(llama(num_key_value_heads=1, num_hidden_layers=3), shard="60KB"),
    "llama3-rope": llama(rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "mistral-window": Case(MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}, dtype=torch.float16),
    "mistral-no-window": Case(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": Case(Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 96, "num_attention_heads": 6}),
    "qwen2-tied-window": Case(
        Qwen2ForCausalLM,
        Qwen2Config,
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    ),
    "qwen3": Case(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}, dtype=torch.bfloat16),
    "qwen3-tied": Case(Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


def with_f16_pages(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, mask: Any, **rest: Any) -> Any:
    """Eager attention over keys and values that were stored as f16."""
    return eager_attention_forward(module, query, key.half().float(), value.half().float(), mask, **rest)


AttentionInterface.register("with_f16_pages", with_f16_pages)
AttentionMaskInterface.register("with_f16_pages", eager_mask)


@dataclass
class Altered:
    """A checkpoint that says something else of itself: what a reader with a mistake would have seen."""

    checkpoint: Checkpoint
    config: ModelConfig
    interleaved_rope: bool
    path: str = "altered"
    zeroed: str = "(none)"

    def names(self) -> tuple[str, ...]:
        return self.checkpoint.names()

    def header(self, name: str) -> TensorHeader:
        return self.checkpoint.header(name)

    def tensor(self, name: str) -> RawTensor:
        raw = self.checkpoint.tensor(name)
        return replace(raw, data=np.zeros_like(raw.data)) if self.zeroed in name else raw


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, NDArray[np.float32]]]]:
    """Directory and logits [tokens, vocab] (float pages and f16 pages) of a case, each made once."""

    @cache
    def make(name: str) -> tuple[Path, dict[str, NDArray[np.float32]]]:
        case, directory = CASES[name], tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        model = case.model(case.config(**(SHAPE | case.changes), initializer_range=0.15)).to(case.dtype)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms are initialised to one and biases to zero, which would hide them
                    parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in parameter_name else 0.2))
        model.save_pretrained(directory, max_shard_size=case.shard)
        logits = {}
        for pages, attention in (("float", "eager"), ("f16", "with_f16_pages")):
            loaded = case.model.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
            with torch.no_grad():
                ids = torch.from_numpy(prompt().tokens.astype(np.int64))[None]
                logits[pages] = loaded(ids, use_cache=False).logits[0].numpy()
        return directory, logits

    return make


def prompt() -> TokenSequence:
    return random_sequences([NUM_TOKENS], VOCAB, seed=7)[0]


def logits_of_reference(checkpoint: Checkpoint) -> NDArray[np.float32]:
    engine = engine_config(checkpoint.config, num_pages=2, kv_dtype="f32")
    executor = ReferenceExecutor.load(checkpoint, engine, num_pages=2, activations="float")
    return run_chunks(executor, prompt(), 23)


def logits_of_native(checkpoint: Checkpoint, chunk: int) -> NDArray[np.float32]:
    executor = NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=2))
    return run_chunks(executor, prompt(), chunk)


def error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference at any position, in units of the logits' root mean square."""
    assert found.shape == expected.shape == (NUM_TOKENS, VOCAB)
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(expected**2)))


@pytest.mark.parametrize("name", CASES)
def test_reference_has_the_logits_of_transformers(name: str, saved: Any) -> None:
    directory, logits = saved(name)
    assert error(logits_of_reference(open_checkpoint(directory)), logits["float"]) < FLOAT


@pytest.mark.parametrize("name", CASES)
def test_native_has_the_logits_of_transformers(name: str, saved: Any) -> None:
    directory, logits = saved(name)
    for chunk in (NUM_TOKENS, 1):
        assert error(logits_of_native(open_checkpoint(directory), chunk), logits["f16"]) < F16_PAGES


def test_the_f16_pages_of_transformers_matter(saved: Any) -> None:
    """Else the second comparison would be the first."""
    _, logits = saved("llama")
    assert F16_PAGES < error(logits["f16"], logits["float"]) < 10 * F16_PAGES


def test_the_cases_are_what_their_names_say(saved: Any) -> None:
    configs = {name: open_checkpoint(saved(name)[0]).config for name in CASES}
    assert len(list(saved("llama-mqa-sharded")[0].glob("*.safetensors"))) > 2
    assert json.loads((saved("mistral-window")[0] / "config.json").read_text())["sliding_window"] == WINDOW
    kinds = {name: open_checkpoint(saved(name)[0]).tensor("token_embd.weight").kind for name in CASES}
    assert set(kinds.values()) == {"F32", "F16", "BF16"}
    assert {name for name, config in configs.items() if config.tie_embeddings} == {
        "llama-tied-bf16",
        "qwen2-tied-window",
        "qwen3-tied",
    }
    assert {name for name, config in configs.items() if config.sliding_window == WINDOW} == {
        "mistral-window",
        "qwen2-tied-window",
    }
    scaled = {name: config.rope.scaling.kind for name, config in configs.items() if config.rope.scaling}
    assert scaled == {"llama3-rope": "llama3", "llama-linear-rope": "linear"}


def _with(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, **changes)


def _scaling(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.rope.scaling is not None
        return replace(config, rope=replace(config.rope, scaling=replace(config.rope.scaling, **changes)))

    return change


MISTAKES: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "other theta": ("llama", _with(rope=RopeConfig(510.0, 16))),
    "half the head rotates": ("llama", _with(rope=RopeConfig(500.0, 8))),
    "other epsilon": ("llama", _with(rms_norm_eps=1e-3)),
    "rope scaling ignored (llama3)": ("llama3-rope", _with(rope=RopeConfig(10000.0, 16))),
    "low frequencies start elsewhere": ("llama3-rope", _scaling(low_freq_factor=1.2)),
    "high frequencies start elsewhere": ("llama3-rope", _scaling(high_freq_factor=4.5)),
    "another trained context": ("llama3-rope", _scaling(original_context=36)),
    "rope scaling ignored (linear)": ("llama-linear-rope", _with(rope=RopeConfig(10000.0, 16))),
    "window ignored": ("mistral-window", _with(sliding_window=None)),
    "window one too long": ("mistral-window", _with(sliding_window=WINDOW + 1)),
    "window one too short": ("mistral-window", _with(sliding_window=WINDOW - 1)),
    "window where there is none": ("mistral-no-window", _with(sliding_window=NUM_TOKENS - 1)),
    "biases ignored": ("qwen2", _with(architecture="llama", attention_bias=False)),
    "norms of heads ignored": ("qwen3", _with(architecture="llama", qk_norm=False)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Any) -> None:
    name, change = MISTAKES[mistake]
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, change(checkpoint.config), checkpoint.interleaved_rope)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT
    assert error(logits_of_native(altered, NUM_TOKENS), logits["f16"]) > SEEN * F16_PAGES


@pytest.mark.parametrize("name", CASES)
def test_the_wrong_rope_pairing_is_seen(name: str, saved: Any) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, not checkpoint.interleaved_rope)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT
    assert error(logits_of_native(altered, NUM_TOKENS), logits["f16"]) > SEEN * F16_PAGES


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("qwen2", f"blk.1.attn_{x}.bias") for x in "qkv"] + [("qwen3", f"blk.1.attn_{x}_norm.weight") for x in "qk"],
)
def test_a_lost_vector_of_one_layer_is_seen(name: str, tensor: str, saved: Any) -> None:
    """Softmax would be blind to a bias of keys, but for their rotation."""
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, checkpoint.interleaved_rope, zeroed=tensor)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT
    assert error(logits_of_native(altered, NUM_TOKENS), logits["f16"]) > SEEN * F16_PAGES
