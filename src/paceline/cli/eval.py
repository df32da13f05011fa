"""Measures what a model's weights and formats cost in quality: perplexity, KL divergence from a reference, agreement
with it, and size.

MODEL may name how it is loaded, after a colon: smollm2-135m:int8, or smollm2-135m:weights=int4,head=int8,kv=int8. With
--tasks it is lm-eval's tasks that are run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import eval_tasks
from paceline.cli.arguments import DEFAULT_MODEL, add_load_arguments, engine_config, positive
from paceline.cli.session import fetch_model
from paceline.cli.terminal import Progress, bold, dim, table
from paceline.measure.plot_file import check_plot_file

if TYPE_CHECKING:
    from paceline.measure.quality.subject import Opened, Subject, Vocabulary
    from paceline.measure.quality.texts import WindowShape
    from paceline.measure.quality.windows import Window

NAME = "eval"
HELP = "measure what weights and formats cost in quality"
DEFAULT_CONTEXT = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, the reference, the text and how it is cut, output, how the models are loaded."""
    parser.add_argument(
        "models",
        nargs="*",
        default=[DEFAULT_MODEL],
        metavar="MODEL",
        help="an alias, a .gguf file, a directory or a hub id; formats may follow a colon: MODEL:int8, "
        "MODEL:weights=int4,head=int8,kv=int8",
    )
    parser.add_argument(
        "--reference",
        metavar="REF",
        help="what they are compared with, a MODEL as above but with weights, keys and values in f32 unless it says "
        "otherwise (MODEL:native), or none (default: the first model)",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text to score (default: one of Paceline's own)")
    text.add_argument(
        "--chat",
        type=Path,
        metavar="FILE",
        help="JSON lines of messages instead, put through the chat template; the assistant's tokens are scored",
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="only the first N tokens (of a chat: scored ones)")
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of a window (default 512); of a task's prompt with its answer (default: the model's own limit)",
    )
    parser.add_argument(
        "--stride", type=positive, metavar="N", help="tokens from one window to the next (default: half the context)"
    )
    parser.add_argument(
        "--windows",
        choices=eval_tasks.WINDOWS,
        default=eval_tasks.WINDOWS[0],
        help="sliding scores every token once; chunks scores the second half of chunks side by side, as "
        "llama-perplexity does",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--plot",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="draw quality over size: .html (with the table), .svg or .png; may be repeated",
    )
    parser.add_argument(
        "--speed", action="store_true", help="measure as well how fast they decode and prefill, one stream, in turns"
    )
    eval_tasks.add_arguments(parser)
    add_load_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Scores the models, draws, and prints the table; or runs tasks over them."""
    eval_tasks.check_arguments(args)
    for path in args.plot:
        check_plot_file(path)
    document = evaluate_models(args) if args.tasks is None else eval_tasks.evaluate_tasks(args)
    for path in args.plot:
        _plot(path, document)
    if args.json:
        import json

        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(summary(document) if args.tasks is None else eval_tasks.summary(document)))
    return 0


def evaluate_models(args: argparse.Namespace) -> dict[str, Any]:
    """All that was found, as plain data for JSON."""
    from paceline.measure.quality.evaluation import evaluate, subject_document
    from paceline.measure.quality.texts import WindowShape
    from paceline.measure.record import environment

    shape = WindowShape(args.windows, args.context or DEFAULT_CONTEXT, args.stride)
    if args.speed:
        from paceline.measure.quality.speed import check_room

        check_room(shape.context)
    opened, reference = _open(args, shape.context)
    vocabulary, source, windows = _windows(args, shape, opened, reference)
    loaded = _load([*opened, *([] if reference is None else [reference])])
    compared = None if reference is None else loaded.pop()
    with Progress("Scoring") as progress:
        figures, own = evaluate(
            loaded, windows, reference=compared, num_shared=vocabulary.num_shared, report=progress.update
        )
    everyone = [*([] if compared is None else [compared]), *loaded]
    speeds = _speeds(everyone, windows) if args.speed else [{}] * len(everyone)
    documents = [
        subject_document(subject, one) | speed
        for subject, one, speed in zip(everyone, [*([] if own is None else [own]), *figures], speeds, strict=True)
    ]
    return {
        "text": source,
        "windows": {"kind": shape.kind, "context": shape.context, "stride": shape.step, "number": len(windows)},
        "reference": None if compared is None else documents[0],
        "models": documents[len(documents) - len(loaded) :],
        "environment": environment(),
    }


def _speeds(subjects: Sequence[Subject], windows: Sequence[Window]) -> list[dict[str, Any]]:
    from paceline.measure.quality.speed import measure_speed

    with Progress("Timing") as progress:
        speeds = measure_speed(subjects, windows[0].tokens.tolist(), report=progress.update)
    return [speed.document() for speed in speeds]


def summary(document: Mapping[str, Any]) -> list[str]:
    """The table for a person."""
    from paceline.measure.quality.report import report_of

    report = report_of(document)
    head, *lines = table(report.header, report.rows, right=frozenset(range(1, len(report.header))))
    return [bold(head, sys.stdout), *lines, "", *(dim(note, sys.stdout) for note in report.notes)]


def _plot(path: Path, document: Mapping[str, Any]) -> None:
    from paceline.measure.quality.chart import chart_of, draw_page, draw_png, draw_svg
    from paceline.measure.quality.report import report_of

    chart = chart_of(document)
    if path.suffix == ".png":
        draw_png(chart, path)
    elif path.suffix == ".svg":
        path.write_text(draw_svg(chart), encoding="utf-8")
    else:
        report = report_of(document)
        path.write_text(draw_page(chart, report.header, report.rows, report.notes), encoding="utf-8")


def _open(args: argparse.Namespace, context: int) -> tuple[list[Opened], Opened | None]:
    """The models and the reference, their headers read and their vocabularies not compared yet."""
    from paceline.config import EngineConfig
    from paceline.measure.quality.choice import ModelChoice, parse_choice
    from paceline.measure.quality.subject import open_choice

    choices = [parse_choice(text) for text in args.models]
    base = engine_config(args)

    def opened(choice: ModelChoice, config: EngineConfig) -> Opened:
        return open_choice(choice, config, context=context, path=fetch_model(choice.model))

    models = [opened(choice, base) for choice in choices]
    if args.reference == "none":
        return models, None
    plain = EngineConfig(weights="f32", kv_dtype="f32", num_threads=base.num_threads, isa=base.isa)
    if args.reference is not None:
        return models, opened(parse_choice(args.reference), plain)
    return models, opened(ModelChoice(f"{choices[0].model}:f32", choices[0].model), plain)


def _windows(
    args: argparse.Namespace, shape: WindowShape, opened: Sequence[Opened], reference: Opened | None
) -> tuple[Vocabulary, str, list[Window]]:
    """The vocabulary that all share, what the text is, and its windows."""
    from paceline.measure.quality.subject import Vocabulary
    from paceline.measure.quality.texts import BUILT_IN, chat_windows, read_conversations, read_text, text_windows

    # Files first: what is wrong with them is known at once.
    conversations = None if args.chat is None else read_conversations(args.chat)
    text = read_text(args.text or BUILT_IN) if conversations is None else ""
    first, *others = [*([] if reference is None else [reference]), *opened]
    with Progress("Reading vocabularies"):
        vocabulary = Vocabulary(first)
        for other in others:
            vocabulary.check(other)
    if conversations is not None:
        windows = chat_windows(
            conversations, vocabulary.tokenizer, vocabulary.template(), shape, num_tokens=args.tokens
        )
        return vocabulary, f"the assistant in {args.chat}", windows
    windows = text_windows(text, vocabulary.tokenizer, shape, field="text", num_tokens=args.tokens)
    return vocabulary, "Paceline's own text" if args.text is None else str(args.text), windows


def _load(models: Sequence[Opened]) -> list[Subject]:
    from paceline.machine import detect_machine
    from paceline.measure.quality.subject import check_memory

    check_memory(models, detect_machine().available_bytes)
    loaded = []
    for model in models:
        with Progress(f"Loading {model.name}"):
            loaded.append(model.load())
    return loaded
