"""GGUF files that we write in llama.cpp: the same ids for a text, and our greedy text up to ties.

Both engines round activations to int8 in groups of 32, but not in the same arithmetic, so their logits differ a
little, and where two tokens are nearly equal either may win. What counts as a tie is measured: how far the margin
between llama.cpp's two best tokens lies from ours, at the worst position of a text. Our greedy tokens may then be below
llama.cpp's best by no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import file_config, write_directory_model
from numpy.typing import NDArray
from rounded_models import RoundedModel
from token_sequences import TokenSequence, engine_config, run_chunks
from tokenizer_files import TEXTS

from paceline import LLM, SamplingParams
from paceline.executors.native import NativeExecutor
from paceline.quantize.export.gguf_vocabulary import PROBES
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint

llama_cpp = pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.timeout(600)
NEW_TOKENS = 32
PROMPTS = [
    "<|im_start|>user\nExplain why the sky is blue in three sentences.<|im_end|>\n<|im_start|>assistant\n",
    "The capital of France is",
    "def fibonacci(n):\n    ",
]
TEXT = (
    "The history of the steam engine goes back to the first century, when Hero of Alexandria described a hollow "
    "sphere that turned as steam left it through two bent tubes. It moved nothing else, and for sixteen centuries "
    "nobody asked it to. Miners did the asking: their shafts filled with water, horses were dear, and a machine "
    "that burned the coal they stood on was worth even the wasteful thing that Newcomen built in 1712."
)


def load(path: Path, *, vocab_only: bool = False) -> Any:
    """The file in llama.cpp, on one thread."""
    return llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, n_threads=1, logits_all=True, vocab_only=vocab_only, verbose=False
    )


def ids_of(theirs: Any, text: str) -> list[int]:
    return list(theirs.tokenize(text.encode(), add_bos=False, special=True))


def logits_of(theirs: Any, ids: list[int]) -> NDArray[np.float32]:
    """[tokens, vocab]"""
    theirs.reset()
    theirs.eval(ids)
    return np.array(theirs.scores[: len(ids)], np.float32)


def divergence(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Mean Kullback-Leibler divergence of the rows."""
    p, q = (
        shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        for logits in (expected, found)
        for shifted in (logits.astype(np.float64) - logits.max(axis=1, keepdims=True),)
    )
    return float(np.sum(np.exp(p) * (p - q), axis=1).mean())


@pytest.mark.parametrize(("bits", "symmetric", "head_bits"), [(4, True, None), (4, False, 4), (8, True, 16)])
def test_our_greedy_text_is_theirs_up_to_ties(
    tmp_path: Path, bits: int, symmetric: bool, head_bits: int | None
) -> None:
    source = open_checkpoint(resolve_model("smollm2-135m", download=False))
    path = tmp_path / "m.gguf"
    write_model(RoundedModel(source, Scheme("rtn", bits, 32, symmetric)), path, "gguf", head_bits=head_bits)
    theirs, ours = load(path), open_checkpoint(path)
    ids = load_tokenizer(ours).encode(TEXT)
    assert ids_of(theirs, TEXT) == ids
    sequence = TokenSequence(np.array(ids, np.int32), np.arange(8, dtype=np.int32))
    native = NativeExecutor.load(ours, engine_config(ours.config, num_pages=8))
    exact = NativeExecutor.load(ours, engine_config(ours.config, num_pages=8, weights="f32"))
    expected, found = logits_of(theirs, ids), run_chunks(native, sequence, 64)
    without_rounding = run_chunks(exact, sequence, 64)
    # Measured: 0.003 to 0.005, and ours a little less; rows of q and k in another order give more than 1.
    for logits in (expected, found):
        assert divergence(without_rounding, logits) < 0.02
    best = np.argsort(expected, axis=1)[:, -2:]
    margins = [np.diff(np.take_along_axis(logits, best, axis=1)) for logits in (expected, found)]
    bound = float(np.abs(margins[0] - margins[1]).max())
    assert 0.01 < bound < 1.5

    llm = LLM(str(path), speculate="off")
    num_same = num_tokens = 0
    for prompt in PROMPTS:
        start = llm.tokenizer.encode(prompt)
        answer = llm.generate([start], SamplingParams(max_tokens=NEW_TOKENS, temperature=0))[0]
        chosen = np.array(answer.token_ids)
        logits = logits_of(theirs, [*start, *answer.token_ids])[len(start) - 1 : -1]
        behind = logits.max(axis=1) - logits[np.arange(len(chosen)), chosen]
        assert (behind <= bound).all(), f"{prompt!r}: {behind.max()} is no tie"
        num_same += int((behind == 0).sum())
        num_tokens += len(chosen)
    assert num_tokens > 2 * NEW_TOKENS
    assert num_same >= 0.8 * num_tokens


def test_the_packaged_model_s_ids(tmp_path: Path) -> None:
    """Also after the tokenizer has been a tokenizer.json in between."""
    source = open_checkpoint(resolve_model("smollm2-135m", download=False))
    write_model(RoundedModel(source, Scheme("rtn", 4, 32)), tmp_path / "m", "compressed-tensors")
    between = open_checkpoint(tmp_path / "m")
    write_model(RoundedModel(between, Scheme("rtn", 4, 32, True)), tmp_path / "m.gguf", "gguf")
    ours, theirs = load_tokenizer(source), load(tmp_path / "m.gguf")
    for text in (*TEXTS, *PROBES, *PROMPTS, TEXT):
        if "\0" not in text:  # llama.cpp's Python binding ends a text there
            assert ids_of(theirs, text) == ours.encode(text), text
    assert theirs.token_eos() == ours.eos_token_ids[0]
    assert theirs.token_bos() == ours.bos_token_id
    text = theirs("The capital of France is", max_tokens=6, temperature=0)["choices"][0]["text"]
    assert "Paris" in text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_ids_of_other_vocabularies(tmp_path: Path, pre: str) -> None:
    path = write_directory_model(tmp_path / "source", file_config(pre), pre=pre)
    source = open_checkpoint(path)
    write_model(RoundedModel(source, Scheme("rtn", 8, 32, True)), tmp_path / "m.gguf", "gguf")
    ours, theirs = load_tokenizer(source), load(tmp_path / "m.gguf")
    for text in (*TEXTS, *PROBES):
        if "\0" not in text:
            assert ids_of(theirs, text) == ours.encode(text), text
    ids = ours.encode(TEXT)
    expected = logits_of(theirs, ids)
    native = NativeExecutor.load(source, engine_config(source.config, num_pages=64))
    sequence = TokenSequence(np.array(ids, np.int32), np.arange(64, dtype=np.int32))
    found = run_chunks(native, sequence, 64)
    assert np.abs(expected - found).max() < 0.1 * np.abs(found).max()
