"""GPTQ on layers of the packaged model: its proxy loss is below that of rounding, and descent takes it further down.

All layers: ``python benchmarks/proxy_loss.py smollm2-135m``.
"""

from __future__ import annotations

import numpy as np

from paceline.quantize.calibration import read_calibration
from paceline.quantize.forward import SequenceForward, Values, checkpoint_values
from paceline.quantize.gptq import Elimination, Problem, proxy_loss, round_columns
from paceline.quantize.grid import range_grid, searched_grid
from paceline.quantize.moments import input_moments
from paceline.quantize.refine import refine
from paceline.quantize.scheme import Scheme
from paceline.text.chat import load_chat_template
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint

SCHEME = Scheme("gptq", 4, 64)
LAYERS = 2


def test_the_losses_of_the_first_layers_fall_from_step_to_step() -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2-135m"))
    tokens = read_calibration(
        None, load_tokenizer(checkpoint), load_chat_template(checkpoint), num_tokens=1024, sequence_tokens=256
    ).tokens
    assert tokens.shape == (4, 256)
    forward = SequenceForward(checkpoint)
    values: Values = {}
    num_matrices = 0
    for stage in forward.stages[: 1 + 4 * LAYERS]:
        if stage.matrices:
            W = np.concatenate([checkpoint_values(checkpoint, name) for name in stage.matrices])
            H = Problem(W, input_moments(stage, values, tokens).H).damped()
            ranges, searched = range_grid(W, SCHEME, 64), searched_grid(W, SCHEME, 64, Elimination.of(H).importance())
            rounded = proxy_loss(W, ranges.values(ranges.codes(W)), H)
            solved = proxy_loss(W, ranges.values(round_columns(W, Elimination.of(H), ranges)), H)
            better = round_columns(W, Elimination.of(H), searched)
            descended, grid = refine(W, H, better, searched, sweeps=2, symmetric=False)
            final = proxy_loss(W, grid.values(descended), H)
            assert solved < 0.9 * rounded, stage.matrices
            assert final < 0.99 * solved, stage.matrices
            assert final < proxy_loss(W, searched.values(better), H), stage.matrices
            num_matrices += len(stage.matrices)
        forward.run(stage, values, tokens)
    assert num_matrices == 7 * LAYERS
