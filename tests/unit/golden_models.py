"""Tiny random Hugging Face models made in the test, their logits by Transformers, and ours.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from token_sequences import TokenSequence, engine_config, random_sequences, run_chunks
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as attention_with_sinks

from paceline.config import ModelConfig
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.executors.torch.executor import TorchExecutor
from paceline.executors.torch.forward import TorchModel
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import Checkpoint, RawTensor, TensorHeader

FLOAT, F16_PAGES = 1e-4, 2e-3
SEEN = 50
NUM_TOKENS = 40
VOCAB = 301
WINDOW = 9
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
    seed: int = 1


def with_f16_pages(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, mask: Any, **rest: Any) -> Any:
    """Eager attention over keys and values that were stored as f16. Gemma 2's, which caps scores where asked to, or
    that of gpt-oss.
    """
    attention = attention_with_sinks if hasattr(module, "sinks") else eager_attention_forward
    return attention(module, query, key.half().float(), value.half().float(), mask, **rest)


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
    less: tuple[str, float] = ("(none)", 0.0)
    """End of the names of vectors that are so much less."""

    def names(self) -> tuple[str, ...]:
        return self.checkpoint.names()

    def header(self, name: str) -> TensorHeader:
        return self.checkpoint.header(name)

    def tensor(self, name: str) -> RawTensor:
        raw = self.checkpoint.tensor(name)
        if name.endswith(self.less[0]):
            values = dequantize(replace(raw, shape=(1, *raw.shape)))[0] - np.float32(self.less[1])
            return RawTensor(name, raw.shape, "F32", values.view(np.uint8))
        return replace(raw, data=np.zeros_like(raw.data)) if self.zeroed in name else raw


Saved = Callable[[str], tuple[Path, dict[str, NDArray[np.float32]]]]


def saved_cases(cases: Mapping[str, Case], factory: pytest.TempPathFactory) -> Saved:
    """Directory and logits [tokens, vocab] (float pages and f16 pages) of a case, each made once."""

    @cache
    def make(name: str) -> tuple[Path, dict[str, NDArray[np.float32]]]:
        case, directory = cases[name], factory.mktemp(name)
        torch.manual_seed(case.seed)
        model = case.model(case.config(**({"initializer_range": 0.15} | SHAPE | case.changes))).to(case.dtype)
        with torch.no_grad():
            # Norms are initialised to one and biases to zero, which would hide them.
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() == 1 or "bias" in parameter_name:
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


def logits_of_torch(checkpoint: Checkpoint) -> NDArray[np.float32]:
    engine = engine_config(checkpoint.config, num_pages=2, kv_dtype="f32")
    return run_chunks(TorchExecutor.load(checkpoint, engine), prompt(), 23)


def logits_with_gradients(checkpoint: Checkpoint) -> NDArray[np.float32]:
    """Of the torch executor's pass for training."""
    model = TorchModel.load(checkpoint, requires_grad=True)
    found: NDArray[np.float32] = (
        model.logits(torch.from_numpy(prompt().tokens.astype(np.int64))[None])[0].detach().numpy()
    )
    return found


FLOAT_LOGITS = {"reference": logits_of_reference, "torch": logits_of_torch, "torch training": logits_with_gradients}
"""What computes in float32 over float32 pages: within ``FLOAT`` of Transformers."""


def logits_of_native(checkpoint: Checkpoint, chunk: int) -> NDArray[np.float32]:
    executor = NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=2))
    return run_chunks(executor, prompt(), chunk)


def error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference at any position, in units of the logits' root mean square."""
    assert found.shape == expected.shape == (NUM_TOKENS, VOCAB)
    return float(np.abs(found - expected).max() / np.sqrt(np.mean(expected**2)))


Change = Callable[[ModelConfig], ModelConfig]
"""What a reader with a mistake makes of a configuration."""


def with_fields(**changes: Any) -> Change:
    """Other fields."""
    return lambda config: replace(config, **changes)


def with_scaling(**changes: Any) -> Change:
    """Other fields of the scaling of the rotation."""

    def change(config: ModelConfig) -> ModelConfig:
        assert config.rope.scaling is not None
        return replace(config, rope=replace(config.rope, scaling=replace(config.rope.scaling, **changes)))

    return change


def assert_floats_agree(saved: Saved, name: str, executor: str) -> None:
    """An executor of ``FLOAT_LOGITS`` computes what Transformers does."""
    directory, logits = saved(name)
    assert error(FLOAT_LOGITS[executor](open_checkpoint(directory)), logits["float"]) < FLOAT


def assert_native_agrees(saved: Saved, name: str) -> None:
    """So does the native executor, in one chunk and row by row."""
    directory, logits = saved(name)
    for chunk in (NUM_TOKENS, 1):
        assert error(logits_of_native(open_checkpoint(directory), chunk), logits["f16"]) < F16_PAGES


def assert_seen(altered: Altered, logits: Mapping[str, NDArray[np.float32]]) -> None:
    """What a checkpoint says wrongly of itself shows in the logits of both."""
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT
    assert error(logits_of_native(altered, NUM_TOKENS), logits["f16"]) > SEEN * F16_PAGES


def assert_mistake_is_seen(saved: Saved, name: str, change: Change) -> None:
    """That reader would be found out, and the change is one."""
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    changed = change(checkpoint.config)
    assert changed != checkpoint.config
    assert_seen(Altered(checkpoint, changed, checkpoint.interleaved_rope), logits)
