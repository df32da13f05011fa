"""`paceline eval --tasks`: lm-eval's tasks over each model, and a table with a column a model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import engine_config, positive
from paceline.cli.session import open_model
from paceline.cli.terminal import Progress, bold, table
from paceline.errors import ParameterError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOWS = ("sliding", "chunks")

TEXT_OPTIONS = ("reference", "text", "chat", "tokens", "stride", "plot", "speed")
"""What asks for something that tasks have not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which tasks, where they are, how much of them."""
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks", metavar="A,B", help="run these tasks of lm-eval instead of scoring a text (needs paceline[eval])"
    )
    group.add_argument(
        "--include-path", type=Path, metavar="DIR", help="directory with more tasks, as lm-eval's YAML files"
    )
    group.add_argument("--limit", type=positive, metavar="N", help="only the first N documents of each task")


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ``ParameterError`` for options of a text beside tasks, and of tasks without them."""
    if args.tasks is None:
        for name in ("include_path", "limit"):
            if getattr(args, name) is not None:
                raise ParameterError(name, str(getattr(args, name)), "with --tasks only")
        return
    for name in TEXT_OPTIONS:
        if getattr(args, name):
            raise ParameterError(name, str(getattr(args, name)), "without --tasks: those bring their own text")
    if args.windows != WINDOWS[0]:
        raise ParameterError("windows", args.windows, "without --tasks: those bring their own text")


def evaluate_tasks(args: argparse.Namespace) -> dict[str, Any]:
    """What was found, as plain data for JSON. Raises ``UnsupportedError`` without lm-eval."""
    from paceline.measure.quality.choice import parse_choice
    from paceline.measure.record import environment

    try:
        from paceline.measure.quality.harness import open_tasks, run_tasks
    except ImportError as error:
        raise UnsupportedError(f"{error}: --tasks needs lm-eval, `pip install paceline[eval]`") from error
    names = [name for name in args.tasks.split(",") if name]
    if not names:
        raise ParameterError("tasks", args.tasks, "names joined by commas")
    choices = [parse_choice(text) for text in args.models]
    with Progress("Looking for tasks"):
        manager = open_tasks(names, args.include_path)
    base = engine_config(args, speculate="off")
    if args.context is not None:
        base = dataclasses.replace(base, context_length=args.context)
    models = []
    for choice in choices:
        llm, _ = open_model(choice.model, choice.config(base))
        with llm, Progress(f"Tasks with {choice.text}") as progress:
            tasks = run_tasks(llm, names, manager, limit=args.limit, report=progress.update)
            models.append({"model": choice.text, "bytes": llm.memory.weight_bytes, "path": llm.path(), "tasks": tasks})
    return {"limit": args.limit, "models": models, "environment": environment()}


def summary(document: Mapping[str, Any]) -> list[str]:
    """The table for a person."""
    models = document["models"]
    header = ["task", "metric", *(model["model"] for model in models)]
    rows = []
    for task, figures in models[0]["tasks"].items():
        for metric in figures:
            if metric != "samples" and "_stderr" not in metric:
                rows.append([task, metric, *(_value(model["tasks"][task], metric) for model in models)])
    head, *lines = table(header, rows, right=frozenset(range(2, len(header))))
    samples: Sequence[str] = [f"{task}: {figures['samples']} documents" for task, figures in models[0]["tasks"].items()]
    return [bold(head, sys.stdout), *lines, "", "; ".join(samples)]


def _value(figures: Mapping[str, Any], metric: str) -> str:
    if metric not in figures:
        return ""
    name, comma, rest = metric.partition(",")
    error = figures.get(f"{name}_stderr{comma}{rest}")
    return f"{figures[metric]:.4f}" + ("" if error is None else f" ± {error:.4f}")
