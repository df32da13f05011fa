"""Moments against sums written out token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import ModelConfig
from paceline.quantize.forward import SequenceForward, checkpoint_values
from paceline.quantize.moments import AsymmetricMoments, input_moments, residual_of

TOKENS = np.random.default_rng(0).integers(0, 75, (6, 20)).astype(np.int32)


@pytest.mark.parametrize("config", [tiny_config(), tiny_config(architecture="qwen2", attention_bias=True)])
@pytest.mark.parametrize("stage_index", [1, 2, 4])
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("weigh", [False, True])
def test_asymmetric_moments(config: ModelConfig, stage_index: int, follow: bool, weigh: bool) -> None:
    """Products are those of the matrices alone: a bias is not theirs to make up for."""
    checkpoint = tiny_checkpoint(config)
    coarse = {
        name: np.round(checkpoint_values(checkpoint, name) * 8) / 8 for name in checkpoint.names() if "blk" in name
    }
    original, quantised = SequenceForward(checkpoint), SequenceForward(checkpoint, coarse.get)
    there: dict[str, np.ndarray] = {}
    here: dict[str, np.ndarray] = {}
    for stage in original.stages[:stage_index]:
        original.run(stage, there, TOKENS)
        quantised.run(stage, here, TOKENS)
    stage = original.stages[stage_index]
    observer = AsymmetricMoments(original, stage, here, follow_residual=follow, weigh_tokens=weigh)
    original.run(stage, dict(there), TOKENS, observe=observer)
    moments = observer.moments
    residual = residual_of(stage)
    assert (residual is None) == (stage_index == 1)
    H = np.zeros_like(moments.H)
    YX = {name: np.zeros_like(table) for name, table in moments.YX.items()}
    for sequence, position in np.ndindex(TOKENS.shape):
        x = here[stage.input][sequence, position].astype(np.float64)
        weight, lag = 1.0, 0.0
        if residual is not None:
            stream = there[residual][sequence, position].astype(np.float64)
            product = checkpoint_values(checkpoint, stage.matrices[0]) @ there[stage.input][sequence, position]
            if weigh:
                weight = 1 / np.mean((stream + product) ** 2)
            if follow:
                lag = stream - here[residual][sequence, position]
        H += weight * np.outer(x, x)
        for name in stage.matrices:
            y = checkpoint_values(checkpoint, name) @ there[stage.input][sequence, position] + lag
            YX[name] += weight * np.outer(y, x)
    np.testing.assert_allclose(moments.H, H, atol=1e-5 * np.abs(H).max())
    for name in stage.matrices:
        np.testing.assert_allclose(moments.YX[name], YX[name], atol=1e-5 * np.abs(YX[name]).max())


def test_with_nothing_quantised_yet_the_products_are_those_of_the_weights() -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    forward = SequenceForward(checkpoint)
    values: dict[str, np.ndarray] = {}
    forward.run(forward.stages[0], values, TOKENS)
    stage = forward.stages[1]
    plain = input_moments(stage, values, TOKENS)
    observer = AsymmetricMoments(forward, stage, values)
    forward.run(stage, dict(values), TOKENS, observe=observer)
    moments = observer.moments
    np.testing.assert_allclose(plain.H, moments.H, rtol=1e-6)
    for name in stage.matrices:
        expected = checkpoint_values(checkpoint, name) @ plain.H
        np.testing.assert_allclose(moments.YX[name], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("weigh", [False, True])
def test_where_a_norm_reads_the_product_its_mean_square_weighs(weigh: bool) -> None:
    """Gemma's: after the norm an error counts relative to the product, whatever the residual stream is."""
    config = tiny_config(architecture="gemma2", activation="gelu_tanh", sliding_window=7, windowed_layers=(True, False))
    checkpoint = tiny_checkpoint(config)
    forward = SequenceForward(checkpoint)
    values: dict[str, np.ndarray] = {}
    for stage in forward.stages[:2]:
        forward.run(stage, values, TOKENS)
    stage = forward.stages[2]
    assert stage.matrices == ("blk.0.attn_output.weight",)
    assert residual_of(stage) is None
    observer = AsymmetricMoments(forward, stage, values, weigh_tokens=weigh)
    x = values[stage.input].reshape(-1, values[stage.input].shape[-1]).astype(np.float64)
    forward.run(stage, dict(values), TOKENS, observe=observer)
    products = x @ checkpoint_values(checkpoint, stage.matrices[0]).astype(np.float64).T
    weights = 1 / np.mean(products**2, axis=1) if weigh else np.ones(len(x))
    H = (x * weights[:, None]).T @ x
    np.testing.assert_allclose(observer.moments.H, H, atol=1e-5 * np.abs(H).max())
