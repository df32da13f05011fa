"""Measures what a model's weights and formats cost in quality: perplexity, KL divergence from a reference, agreement
with it, and size.

MODEL may name how it is loaded, after a colon: smollm2-135m:int8, or smollm2-135m:weights=int4,head=int8,kv=int8.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import DEFAULT_MODEL, add_load_arguments, engine_config, positive
from paceline.cli.session import fetch_model
from paceline.cli.terminal import Progress, bold, dim, table

if TYPE_CHECKING:
    from paceline.measure.quality.subject import Opened, Subject, Vocabulary
    from paceline.measure.quality.texts import WindowShape
    from paceline.measure.quality.windows import Window

NAME = "eval"
HELP = "measure what weights and formats cost in quality"


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
        help="what they are compared with, a MODEL as above, or none (default: the first model, its weights brought "
        "to f32, over keys and values in f32)",
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
    parser.add_argument("--context", type=positive, default=512, metavar="N", help="tokens of a window (default 512)")
    parser.add_argument(
        "--stride", type=positive, metavar="N", help="tokens from one window to the next (default: half the context)"
    )
    parser.add_argument(
        "--windows",
        choices=("sliding", "chunks"),
        default="sliding",
        help="sliding scores every token once; chunks scores the second half of chunks side by side, as "
        "llama-perplexity does",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_load_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Scores the models and prints the table."""
    document = evaluate_models(args)
    if args.json:
        import json

        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(summary(document)))
    return 0


def evaluate_models(args: argparse.Namespace) -> dict[str, Any]:
    """All that was found, as plain data for JSON."""
    from paceline.measure.quality.evaluation import evaluate, subject_document
    from paceline.measure.quality.texts import WindowShape
    from paceline.measure.record import environment

    shape = WindowShape(args.windows, args.context, args.stride)
    opened, reference = _open(args)
    vocabulary, source, windows = _windows(args, shape, opened, reference)
    loaded = _load([*opened, *([] if reference is None else [reference])])
    compared = None if reference is None else loaded.pop()
    with Progress("Scoring") as progress:
        figures, own = evaluate(
            loaded, windows, reference=compared, num_shared=vocabulary.num_shared, report=progress.update
        )
    return {
        "text": source,
        "windows": {"kind": shape.kind, "context": shape.context, "stride": shape.step, "number": len(windows)},
        "reference": None if compared is None or own is None else subject_document(compared, own),
        "models": [subject_document(subject, one) for subject, one in zip(loaded, figures, strict=True)],
        "environment": environment(),
    }


def summary(document: Mapping[str, Any]) -> list[str]:
    """The table for a person."""
    reference, windows = document["reference"], document["windows"]
    header = ["model", "weights", "bits", "perplexity", "± 95 %"]
    if reference is not None:
        header += ["change", "mean KL", "± 95 %", "median", "99 %", "99.9 %", "top-1"]
    rows = [_row(model, compared=reference is not None) for model in document["models"]]
    if reference is not None:
        rows.insert(0, [*_row(reference, compared=False), *[""] * 7])
    lines = table(header, rows, right=frozenset(range(1, len(header))))
    stride = f", stride {windows['stride']}" if windows["kind"] == "sliding" else ", second halves"
    tokens = document["models"][0]["tokens"]
    notes = [
        f"{tokens:,} tokens of {document['text']}, {windows['number']} {windows['kind']} windows of "
        f"{windows['context']}{stride}",
    ]
    if reference is not None:
        notes.append(f"reference: the first row, {reference['path']['kv_dtype']} KV; KL(reference || model) in nats")
    return [bold(lines[0], sys.stdout), *lines[1:], "", *(dim(note, sys.stdout) for note in notes)]


def _row(model: Mapping[str, Any], *, compared: bool) -> list[str]:
    row = [
        model["model"],
        f"{model['bytes'] / 1e6:,.1f} MB",
        f"{model['bits_per_weight']:.2f}",
        f"{model['perplexity']:.3f}",
        _half_width(model["perplexity_ci"], 2),
    ]
    if not compared:
        return row
    return [
        *row,
        f"{100 * (model['perplexity_ratio'] - 1):+.2f} %",
        f"{model['kl_mean']:.5f}",
        _half_width(model["kl_mean_ci"], 5),
        f"{model['kl_median']:.5f}",
        f"{model['kl_p99']:.4f}",
        f"{model['kl_p999']:.4f}",
        f"{100 * model['top1_agreement']:.2f} %",
    ]


def _half_width(interval: Sequence[float] | None, digits: int) -> str:
    return "" if interval is None else f"{(interval[1] - interval[0]) / 2:.{digits}f}"


def _open(args: argparse.Namespace) -> tuple[list[Opened], Opened | None]:
    """The models and the reference, their headers read and their vocabularies not compared yet."""
    from paceline.config import EngineConfig
    from paceline.measure.quality.choice import ModelChoice, parse_choice
    from paceline.measure.quality.subject import open_choice

    choices = [parse_choice(text) for text in args.models]
    base = engine_config(args)

    def opened(choice: ModelChoice, config: EngineConfig) -> Opened:
        return open_choice(choice, config, context=args.context, path=fetch_model(choice.model))

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
