"""Figures of tiny models against a slow evaluation: whole windows through the reference executor, in f64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config

from paceline.config import EngineConfig
from paceline.errors import PacelineError, ParameterError
from paceline.executors.base import StepPlan, StepResult
from paceline.executors.native import NativeExecutor
from paceline.executors.rows_plan import rows_plan
from paceline.measure.quality.evaluation import evaluate, subject_document
from paceline.measure.quality.speed import NUM_NEW, NUM_PROMPT, measure_speed
from paceline.measure.quality.subject import STEP_ROWS, Subject, load_subject, scoring_config
from paceline.measure.quality.windows import Window, sliding_windows

CONTEXT = 2 * STEP_ROWS + 72
"""Three steps, none of which begins where a page does not."""

TEXT = np.random.default_rng(9).integers(0, 75, 2 * CONTEXT).tolist()


def subject(checkpoint: MemoryCheckpoint, name: str = "tiny", **fields: object) -> Subject:
    checkpoint.files = ()  # type: ignore[attr-defined]
    config = scoring_config(checkpoint, EngineConfig(num_threads=2, **fields), context=CONTEXT)  # type: ignore[arg-type]
    return load_subject(name, checkpoint, config)


def all_logits(one: Subject, window: Window) -> np.ndarray:
    """Logits of every row, a row a step, f64."""
    executor = one.executor
    assert isinstance(executor, NativeExecutor)
    rows = []
    for at, token in enumerate(window.tokens.tolist()):
        executor.run(rows_plan([token], at, num_outputs=1))
        rows.append(executor.logits()[0].astype(np.float64))
    return np.array(rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def models() -> dict[str, Subject]:
    checkpoint = tiny_checkpoint(tiny_config(tie_embeddings=False))
    return {
        "f32": subject(checkpoint, "f32", weights="f32", kv_dtype="f32"),
        "int8": subject(checkpoint, "int8", weights="int8", kv_dtype="int8"),
    }


@pytest.mark.parametrize("stride", [CONTEXT - 1, 100])
def test_figures_are_those_of_a_slow_evaluation(models: dict[str, Subject], stride: int) -> None:
    windows = sliding_windows(TEXT, context=CONTEXT, stride=stride)
    (found,), own = evaluate([models["int8"]], windows, reference=models["f32"])
    nll, reference_nll, kl, agrees = [], [], [], []
    for window in windows:
        p, q = (log_softmax(all_logits(models[name], window)) for name in ("f32", "int8"))
        rows, tokens = window.targets - 1, window.tokens[window.targets]
        nll += (-q[rows, tokens]).tolist()
        reference_nll += (-p[rows, tokens]).tolist()
        kl += (np.exp(p) * (p - q)).sum(axis=1)[rows].tolist()
        agrees += (p.argmax(axis=1) == q.argmax(axis=1))[rows].tolist()
    assert len(nll) == len(TEXT) - 1
    assert own is not None
    assert found.kl is not None
    assert found.agrees is not None
    assert found.nll == pytest.approx(nll, abs=2e-6)
    assert own.nll == pytest.approx(reference_nll, abs=2e-6)
    assert found.kl == pytest.approx(kl, abs=2e-6)
    assert found.agrees.tolist() == agrees
    document = found.document()
    assert document["tokens"] == len(nll)
    assert document["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    assert document["perplexity_ratio"] == pytest.approx(math.exp(np.mean(nll) - np.mean(reference_nll)), rel=1e-6)
    assert document["kl_mean"] == pytest.approx(np.mean(kl), abs=1e-6)
    assert document["kl_p999"] == pytest.approx(np.quantile(kl, 0.999), abs=1e-5)
    assert document["top1_agreement"] == np.mean(agrees)
    assert document["kl_mean"] > 1e-5, "the models differ, or nothing is tested"


def test_a_model_is_exactly_itself(models: dict[str, Subject]) -> None:
    windows = sliding_windows(TEXT[:300], context=CONTEXT, stride=100)
    (found,), _ = evaluate([models["int8"]], windows, reference=models["int8"])
    document = found.document()
    assert document["kl_max"] == document["kl_mean"] == document["kl_p999"] == 0.0
    assert document["top1_agreement"] == document["perplexity_ratio"] == 1.0


def test_padding_of_a_vocabulary_is_nobodys_business(models: dict[str, Subject]) -> None:
    """A model whose vocabulary has more rows than there are tokens, those rows the likeliest of all."""
    plain = tiny_checkpoint(tiny_config(tie_embeddings=False))
    padded = tiny_checkpoint(tiny_config(tie_embeddings=False, vocab_size=80))
    tensors = dict(plain.tensors)
    for name in ("token_embd.weight", "output.weight"):
        wide_tensor = padded.tensors[name]
        values = wide_tensor.data.view(np.float32).reshape(80, 64) * np.float32(10)
        values[:75] = plain.tensors[name].data.view(np.float32).reshape(75, 64)
        tensors[name] = replace(wide_tensor, data=values.reshape(-1).view(np.uint8))
    wide = subject(MemoryCheckpoint(padded.config, tensors), "wide", weights="f32", kv_dtype="f32")
    windows = sliding_windows(TEXT[:200], context=CONTEXT, stride=100)
    (found,), _ = evaluate([wide], windows, reference=models["f32"])
    assert found.kl is not None
    assert (found.kl == 0.0).all()
    assert (found.nll == found.reference_nll).all()


def test_sizes_are_of_what_is_loaded(models: dict[str, Subject]) -> None:
    windows = sliding_windows(TEXT[:50], context=CONTEXT, stride=100)
    (found,), _ = evaluate([models["int8"]], windows)
    document = subject_document(models["int8"], found)
    assert "kl_mean" not in document
    assert document["path"]["head"] == "int8"
    assert 9 < document["bits_per_weight"] < 11, "codes and their scales, and an embedding in f32"
    assert models["f32"].num_bytes >= 4 * models["f32"].num_parameters


def test_numbers_that_are_not_finite_are_an_error() -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    norm = checkpoint.tensors["output_norm.weight"]
    huge = np.full(64, 3e38, np.float32).view(np.uint8)
    tensors = {**checkpoint.tensors, "output_norm.weight": replace(norm, data=huge)}
    broken = subject(MemoryCheckpoint(checkpoint.config, tensors), "broken", weights="f32")
    with pytest.raises(PacelineError, match="broken: a logit after token 0 of a window is not finite"):
        evaluate([broken], sliding_windows(TEXT[:50], context=CONTEXT, stride=100))


def test_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"made for \(1024\)"):
        scoring_config(tiny_checkpoint(tiny_config()), EngineConfig(), context=1025)


def test_speeds_are_taken_in_turns(models: dict[str, Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def counted(name: str, executor: NativeExecutor) -> NativeExecutor:
        run = executor.run

        def counting(plan: StepPlan) -> StepResult:
            ran.append(name)
            return run(plan)

        monkeypatch.setattr(executor, "run", counting)
        return executor

    for name, one in models.items():
        assert isinstance(one.executor, NativeExecutor)
        counted(name, one.executor)
    speeds = measure_speed(list(models.values()), TEXT[:20], num_rounds=3)
    turns = [name for name, _ in groupby(ran)]
    # Each round begins with another model: what ends a round begins the next.
    assert turns == ["f32", "int8", "f32", "int8", "f32"]
    assert len(ran) == 4 * 2 * (NUM_PROMPT // STEP_ROWS + NUM_NEW)
    for speed in speeds:
        assert len(speed.decode) == len(speed.prefill) == 3
        assert min(speed.decode) <= speed.document()["decode_tokens_per_s"] <= max(speed.decode)
    short = replace(models["f32"], context_length=NUM_PROMPT + NUM_NEW - 1)
    with pytest.raises(ParameterError, match="at least 320"):
        measure_speed([short], TEXT)
