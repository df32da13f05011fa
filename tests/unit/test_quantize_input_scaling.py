"""AWQ and SmoothQuant on the walk over a model: what they look at, what they leave, where they go on after a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import MemoryCheckpoint, tiny_checkpoint, tiny_config

from paceline.config import ModelConfig
from paceline.quantize import pipeline
from paceline.quantize.awq import clipped_grid
from paceline.quantize.folding import Producer
from paceline.quantize.forward import SequenceForward, Values, checkpoint_values
from paceline.quantize.grid import Table
from paceline.quantize.input_scaling import InputStatistics, quantize_awq
from paceline.quantize.pipeline import FinishedModel, Settings, quantize_model
from paceline.quantize.recipe import Recipe
from paceline.quantize.scheme import Method, Scheme
from paceline.quantize.smoothquant import rounded_per_token
from paceline.quantize.work import WorkDirectory

TOKENS = np.random.default_rng(0).integers(0, 75, (8, 64)).astype(np.int32)
AWQ = Scheme("awq", 3, 32)
W8A8 = Scheme("smoothquant", 8, None, True)
FAMILIES = [tiny_config(), tiny_config(architecture="qwen2", attention_bias=True)]


def uneven_checkpoint(config: ModelConfig) -> MemoryCheckpoint:
    """Some inputs of every matrix are thirty times as large as others."""
    checkpoint = tiny_checkpoint(config)
    for name, raw in checkpoint.tensors.items():
        values = raw.data.view(np.float32).reshape(raw.shape)
        if name.endswith(("attn_norm.weight", "ffn_norm.weight", "attn_v.weight", "ffn_up.weight")):
            values[3::11] *= 30
        if name.endswith(("_q.weight", "_k.weight", "_v.weight", "_gate.weight", "_up.weight")):
            values /= 8
    return checkpoint


def run(work: Path, scheme: Scheme, config: ModelConfig) -> FinishedModel:
    has_tokens = scheme.method != "rtn"
    settings = Settings(scheme, Recipe(), TOKENS if has_tokens else None)
    with WorkDirectory(work, settings.key(b"tiny")) as directory:
        return quantize_model(uneven_checkpoint(config), settings, directory)


def tables(model: FinishedModel) -> dict[str, Table]:
    names = model.checkpoint.names()
    return {name: matrix.values() if (matrix := model.matrix(name)) else model.values(name) for name in names}


def hidden(checkpoint: MemoryCheckpoint, changed: dict[str, Table], *, per_token: bool = False) -> Table:
    forward = SequenceForward(checkpoint, changed.get)
    values: Values = {}
    for stage in forward.stages:
        forward.run(stage, values, TOKENS, linear_input=_rounded if per_token else None)
    return values[forward.graph.hidden.name]


def _rounded(x: Table) -> Table:
    return rounded_per_token(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def error(model: FinishedModel, *, per_token: bool = False) -> float:
    exact = hidden(model.checkpoint, {})
    found = hidden(model.checkpoint, tables(model), per_token=per_token)
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


@pytest.mark.parametrize("config", FAMILIES)
def test_awq_is_better_than_rounding(tmp_path: Path, config: ModelConfig) -> None:
    rounded = error(run(tmp_path / "rtn", Scheme("rtn", 3, 32), config))
    model = run(tmp_path / "awq", AWQ, config)
    assert error(model) < 0.7 * rounded
    changed = {name for name in model.checkpoint.names() if name.endswith(("norm.weight", ".bias"))}
    touched = {name for name in changed if (model.values(name) != checkpoint_values(model.checkpoint, name)).any()}
    assert "blk.0.attn_norm.weight" in touched
    assert "output_norm.weight" not in touched
    assert ("blk.0.attn_v.bias" in touched) == config.attention_bias


@pytest.mark.parametrize("config", FAMILIES)
def test_smoothquant_is_better_than_rounding_to_int8(tmp_path: Path, config: ModelConfig) -> None:
    rounded = error(run(tmp_path / "rtn", Scheme("rtn", 8, None, True), config), per_token=True)
    model = run(tmp_path / "smooth", W8A8, config)
    assert error(model, per_token=True) < 0.5 * rounded
    matrix = model.matrix("blk.0.ffn_down.weight")
    assert matrix is not None
    assert matrix.per_token


@pytest.mark.parametrize("scheme", [AWQ, W8A8])
def test_a_run_that_was_cut_short_ends_with_the_values_of_a_whole_one(
    tmp_path: Path, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tables(run(tmp_path / "whole", scheme, FAMILIES[0]))
    name = f"quantize_{scheme.method}"
    quantize = getattr(pipeline, name)
    count = 0

    def stop_later(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return quantize(*arguments)

    monkeypatch.setattr(pipeline, name, stop_later)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", scheme, FAMILIES[0])
    found = tables(run(tmp_path / "cut", scheme, FAMILIES[0]))
    assert count == 4 + 8 - 3  # the stages that were finished are not done again
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(found[tensor], values, err_msg=tensor)


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_a_scale_that_nobody_can_absorb_is_left_out(
    tmp_path: Path, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "can_divide_rows", lambda matrix, scale: False)
    model = run(tmp_path / "w", AWQ if method == "awq" else W8A8, FAMILIES[0])
    assert {name.split(".")[2] for name in model._divisors} == {"attn_norm", "ffn_norm"}
    assert error(model) < 0.5


@pytest.mark.parametrize("sample", [100, 768])
def test_statistics_are_those_of_all_tokens_and_the_sample_some_of_them(
    sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.quantize.input_scaling.SAMPLE_TOKENS", sample)
    monkeypatch.setattr("paceline.quantize.forward.CHUNK_TOKENS", 128)
    drawn = np.sort(np.random.default_rng(0).permutation(512)[:sample])
    forward = SequenceForward(uneven_checkpoint(tiny_config()))
    values: Values = {}
    for stage in forward.stages:
        seen = InputStatistics(stage, (8, 64)) if stage.matrices else None
        before = {name: table.copy() for name, table in values.items()}
        made: Values = {}

        def observe(part: slice, all_values: Values, seen=seen, made=made) -> None:  # type: ignore[no-untyped-def]
            if seen is not None:
                seen(part, all_values)
            for name, table in all_values.items():
                made[name] = np.concatenate([made[name], table]) if name in made else table.copy()

        forward.run(stage, values, TOKENS, observe=observe)
        if seen is None:
            continue
        X = before[stage.input].reshape(512, -1).astype(np.float64)
        after = None
        if stage.matrices[0].endswith("attn_output.weight"):
            after = next(made[name] for name in made if name.endswith("attn_output.weight.residual"))
        elif stage.matrices[0].endswith("ffn_down.weight"):
            after = next(made[name] for name in made if name.endswith("ffn_down.weight.residual"))
        w = np.ones(512) if after is None else 1 / (after.reshape(512, -1).astype(np.float64) ** 2).mean(axis=1)
        np.testing.assert_allclose(seen.H, (X * w[:, None]).T @ X, rtol=1e-3, atol=1e-4 * np.abs(seen.H).max())
        np.testing.assert_array_equal(seen.largest, np.abs(X).max(axis=0))
        np.testing.assert_array_equal(seen.X, X[drawn])
        np.testing.assert_allclose(seen.token_weights, np.sqrt(w)[drawn], rtol=1e-4)


def test_ranges_are_searched_for_the_inputs_as_they_are_then() -> None:
    """Those divided by the scale: what the matrix is multiplied with."""
    forward = SequenceForward(uneven_checkpoint(tiny_config()))
    values: Values = {}
    forward.run(forward.stages[0], values, TOKENS)
    stage = forward.stages[1]
    seen = InputStatistics(stage, (8, 64))
    forward.run(stage, dict(values), TOKENS, observe=seen)
    tables = {name: forward.weights.values(name) for name in stage.matrices}
    found = quantize_awq(tables, seen, AWQ, Producer("norm"))
    assert found.divisor is not None
    scaled = seen.H / np.outer(found.divisor, found.divisor)
    for name, W in tables.items():
        grid = clipped_grid(W * found.divisor, scaled, AWQ, 32)
        matrix = found.quantised[name].matrix
        np.testing.assert_array_equal(matrix.scale, grid.scale)
        np.testing.assert_array_equal(matrix.codes, grid.codes(W * found.divisor))
        lost = np.einsum("nk,kj,nj->", E := matrix.values() / found.divisor - W, seen.H, E)
        assert found.quantised[name].error == pytest.approx(np.sqrt(lost / np.einsum("nk,kj,nj->", W, seen.H, W)))
