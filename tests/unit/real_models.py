"""A real model beside Transformers' model of the same weights: logits of a text, and greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from token_sequences import TokenSequence, engine_config, run_chunks, run_step
from transformers import PreTrainedModel

from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.gguf import GGUFCheckpoint

TEXT = (
    "The history of the steam engine goes back to the first century, when Hero of Alexandria described a hollow "
    "sphere that turned as steam left it through two bent tubes. It moved nothing else, and for sixteen centuries "
    "nobody asked it to. Miners did the asking: their shafts filled with water, horses were dear, and a machine "
    "that burned the coal they stood on was worth even the wasteful thing that Newcomen built in 1712. Watt's "
    "separate condenser saved three quarters of the fuel; his patent held others back for thirty years, and the "
    "railway came only after it had ended."
)


@dataclass
class RealModel:
    """The packaged model, ours and Transformers', loaded when first used."""

    checkpoint: GGUFCheckpoint
    make: Callable[[GGUFCheckpoint], PreTrainedModel]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.checkpoint)

    @cached_property
    def native(self) -> NativeExecutor:
        return NativeExecutor.load(self.checkpoint, engine_config(self.checkpoint.config, num_pages=8))

    @cached_property
    def reference(self) -> ReferenceExecutor:
        engine = engine_config(self.checkpoint.config, num_pages=8)
        return ReferenceExecutor.load(self.checkpoint, engine, num_pages=8, activations="float")

    @cached_property
    def transformers(self) -> PreTrainedModel:
        return self.make(self.checkpoint)

    @cached_property
    def native_text(self) -> NDArray[np.float32]:
        return run_chunks(self.native, self.tokens(TEXT), 64)

    @cached_property
    def expected_text(self) -> NDArray[np.float32]:
        return self.expected(self.tokens(TEXT).tokens)

    def tokens(self, text: str) -> TokenSequence:
        ids = np.array(self.tokenizer.encode(text), np.int32)
        return TokenSequence(ids, np.arange(8, dtype=np.int32))

    def expected(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Transformers' logits [tokens, vocab]."""
        with torch.no_grad():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            return self.transformers(ids, use_cache=False).logits[0].numpy()


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL divergence (expected, found) [rows]."""
    p, q = log_softmax(expected), log_softmax(found)
    return np.sum(np.exp(p) * (p - q), axis=-1)


def margin_bound(model: RealModel) -> float:
    """How far int8 activations move the margin between Transformers' two best tokens, at any position of the text."""
    order = np.argsort(model.expected_text, axis=1)[:, -2:]
    theirs, ours = (np.take_along_axis(x, order, axis=1) for x in (model.expected_text, model.native_text))
    return float(np.abs(np.diff(theirs, axis=1) - np.diff(ours, axis=1)).max())


def check_greedy(model: RealModel, prompts: Sequence[str], num_new: int, bound: float) -> float:
    """The share of native greedy tokens that are Transformers' own.

    Asserts that the others were undecided: their logit is at most ``bound`` below that of Transformers' best. Both are
    fed the token that the native executor chose, so every position is compared.
    """
    num_same = 0
    for prompt in prompts:
        start = model.tokens(prompt)
        tokens, count = start.tokens, len(start.tokens)
        part = start.part(0, count)
        for _ in range(num_new):
            _, (greedy,) = run_step(model.native, [part])
            tokens = np.append(tokens, greedy[-1:])
            part = replace(start, tokens=tokens).part(len(tokens) - 1, len(tokens))
        logits = model.expected(tokens[:-1])[count - 1 :]
        for chosen, row in zip(tokens[count:], logits, strict=True):
            assert row.max() - row[chosen] <= bound, f"{prompt!r}: {chosen} instead of {row.argmax()} is no tie"
            num_same += int(chosen == row.argmax())
    return num_same / (num_new * len(prompts))
