"""Proves on your model and machine that no path changes an answer: batch, chunks, cache, preemption, threads,
instruction sets, sampling, KV formats. Compares bits; ends with status 1 if any differ."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import (
    add_executor_arguments,
    add_load_arguments,
    add_model_argument,
    engine_config,
    executor_choice,
)
from paceline.cli.run import path_text
from paceline.cli.session import fetch_model
from paceline.cli.terminal import Progress, bold, dim, styled, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.config import EngineConfig
    from paceline.executors.base import Executor
    from paceline.llm import LLM
    from paceline.measure.losslessness import Difference
    from paceline.measure.trace import TopTwo
    from paceline.measure.verification import Proof, Result

NAME = "verify"
HELP = "prove that no path changes an answer"
_COLOURS = {"EQUAL": "32", "TIE": "33", "FAIL": "1;31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, how much of the matrix, how the model is loaded."""
    add_model_argument(parser)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help="each way to compute once, short requests; under a minute (default)"
    )
    extent.add_argument(
        "--full", action="store_true", help="longer requests, and every combination of threads, batch, chunk and cache"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_load_arguments(parser)
    add_executor_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the matrix and prints the verdicts; 1 when any cell fails."""
    path = fetch_model(args.model)
    from paceline.llm import LLM
    from paceline.measure.cells import Host
    from paceline.measure.verification import verify

    choice: dict[str, Any] = executor_choice(args)

    def load(config: EngineConfig, wrap: Callable[[Executor], Executor]) -> LLM:
        return LLM(str(path), config=config, wrap=wrap, **choice)

    config = engine_config(args)
    host = Host.of(config, has_isas=choice.get("executor", "native") == "native")
    with Progress(f"Verifying {args.model}") as progress:
        proof = verify(load, config, host, full=args.full, report=progress.update)
    if args.json:
        import json

        print(json.dumps(document(args.model, proof, full=args.full), indent=2, allow_nan=False))
    else:
        print("\n".join(summary(args.model, proof)))
    return 1 if proof.verdict == "FAIL" else 0


def document(model: str, proof: Proof, *, full: bool) -> dict[str, Any]:
    """The proof as plain data for JSON."""
    from paceline.measure.record import environment

    return {
        "model": model,
        "extent": "full" if full else "quick",
        "verdict": proof.verdict,
        "elapsed_s": proof.elapsed_s,
        "plain_path": proof.plain_path,
        "environment": environment(),
        "cells": [_plain_data(result) for result in proof.results],
    }


def summary(model: str, proof: Proof) -> list[str]:
    """The proof for a person: a table, then what there is to say about single cells."""
    rows, before = [], ""
    for result in proof.results:
        name = result.dimension if result.dimension != before else ""
        before = result.dimension
        rows.append((name, result.varied, result.verdict, f"{result.num_positions:,}", f"{result.elapsed_s:.1f} s"))
    lines = table(("", "what varied", "verdict", "positions", "time"), rows, right=frozenset({3, 4}))
    for at, result in enumerate(proof.results, start=2):
        verdict = styled(result.verdict, _COLOURS[result.verdict], sys.stdout)
        # The name of a cell never holds a verdict in capitals.
        lines[at] = lines[at].replace(result.verdict, verdict, 1)
    counts = {verdict: sum(result.verdict == verdict for result in proof.results) for verdict in _COLOURS}
    return [
        bold(model, sys.stdout) + dim(f" · {path_text(proof.plain_path)}", sys.stdout),
        dim("Compared with the plain path: one request at a time, prompts whole, no cache, 1 thread.", sys.stdout),
        "",
        *lines,
        *(["", *notes] if (notes := _notes(proof.results)) else []),
        "",
        " · ".join(
            [*(f"{count} {verdict}" for verdict, count in counts.items() if count), f"{proof.elapsed_s:.0f} s in all"]
        ),
    ]


def _notes(results: Sequence[Result]) -> list[str]:
    """What there is to say about single cells; what is true of several is said once."""
    cells_of: dict[str, list[str]] = {}
    for result in results:
        for text in _remarks(result):
            cells_of.setdefault(text, []).append(result.varied)
    return [f"{'; '.join(cells)}:\n    {text}" for text, cells in cells_of.items()]


def _remarks(result: Result) -> list[str]:
    remarks = []
    if result.rounding is not None:
        rounding = result.rounding
        remarks.append(
            f"mean KL {rounding.mean_kl:.5f}; logits move by {rounding.drift:.3f} (at most {rounding.drift_bound:.3f})"
        )
        if rounding.margin is not None:
            remarks[0] += (
                f"; the text goes another way after {rounding.num_positions} positions, "
                f"at a margin of {rounding.margin:.3f} (at most {rounding.margin_bound:.3f})"
            )
    if result.difference is not None and result.verdict == "FAIL":
        remarks.append(f"FAIL, {_difference_text(result.difference)}")
    if result.problem is not None:
        remarks.append(f"FAIL, {result.problem}")
    return remarks


def _difference_text(difference: Difference) -> str:
    where = "" if difference.position is None else f", position {difference.position}"
    text = f"request {difference.request!r}{where}: {difference.what}"
    if difference.position is None:
        return text
    return f"{text}\n      plain {_top_text(difference.expected)}\n      here  {_top_text(difference.found)}"


def _top_text(top: TopTwo | None) -> str:
    if top is None:
        return "nothing"
    pairs = " over ".join(f"{token} at {logit:.9g}" for token, logit in zip(top.tokens, top.logits, strict=True))
    return f"{pairs} (margin {top.margin:.3g})"


def _plain_data(value: Any) -> Any:
    """What JSON can hold of a result. Numbers that JSON does not know become text, so that a broken cell can still be
    told."""
    if dataclasses.is_dataclass(value):
        data = {field.name: _plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return data if "logits" not in data else data | {"margin": _plain_data(getattr(value, "margin", None))}
    if isinstance(value, (list, tuple)):
        return [_plain_data(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
