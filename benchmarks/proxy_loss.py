"""GPTQ's proxy loss beside that of rounding to nearest, for every matrix of a model.

Notation: as in ``paceline.quantize.gptq``. Inputs are those of the model that is not quantised, so that both methods
solve the same problem; grids are those of ``range_grid``. Exit status 1 when any matrix is not better off.

    python benchmarks/proxy_loss.py smollm2-135m --tokens 4096
"""

from __future__ import annotations

import argparse

import numpy as np

from paceline.quantize.calibration import read_calibration
from paceline.quantize.forward import SequenceForward, Values, checkpoint_values
from paceline.quantize.gptq import Elimination, Problem, proxy_loss, round_columns
from paceline.quantize.grid import range_grid
from paceline.quantize.moments import input_moments
from paceline.quantize.scheme import Scheme
from paceline.text.chat import load_chat_template
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint


def main() -> int:
    """Prints a line a matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--layers", type=int, default=10**6)
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(args.model))
    tokenizer, template = load_tokenizer(checkpoint), load_chat_template(checkpoint)
    tokens = read_calibration(None, tokenizer, template, num_tokens=args.tokens).tokens
    scheme = Scheme("gptq", args.bits, args.group)
    forward = SequenceForward(checkpoint)
    values: Values = {}
    ratios = []
    for stage in forward.stages:
        if stage.matrices:
            if int(stage.matrices[0].split(".")[1]) >= args.layers:
                break
            H0 = input_moments(stage, values, tokens).H
        for name in stage.matrices:
            W = checkpoint_values(checkpoint, name)
            H = Problem(W, H0).damped()
            grid = range_grid(W, scheme, scheme.group_of(W.shape[1], tensor=name))
            rounded, solved = (
                proxy_loss(W, grid.values(codes), H)
                for codes in (grid.codes(W), round_columns(W, Elimination.of(H), grid))
            )
            ratios.append(solved / rounded)
            print(f"{name:28} rtn {rounded:10.4g}  gptq {solved:10.4g}  {solved / rounded:6.1%}", flush=True)
        forward.run(stage, values, tokens)
    print(f"{len(ratios)} matrices, gptq / rtn: median {np.median(ratios):.1%}, largest {max(ratios):.1%}")
    return int(max(ratios) >= 1)


if __name__ == "__main__":
    raise SystemExit(main())
