"""Makes a model smaller: rounds its layers' matrices to 8, 4 or 3 bits, and writes it in a format that others read too.

A run that was interrupted goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arguments import positive
from paceline.cli.session import fetch_model
from paceline.cli.terminal import Progress, bold, table
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.quantize.pipeline import FinishedModel, Settings
    from paceline.quantize.scheme import Scheme
    from paceline.weights.raw import Checkpoint

NAME = "quantize"
HELP = "make a model smaller, by RTN, GPTQ, AWQ or SmoothQuant"

METHODS = ("gptq", "awq", "smoothquant", "rtn")
RECIPES = ("best", "gptaq", "plain")
FORMATS = ("compressed-tensors", "gptq", "awq", "gguf", "paceline")
CALIBRATED_ONLY = {
    "calibration": "--calibration",
    "calibration_tokens": "--calibration-tokens",
    "seed": "--seed",
}
"""Flags that say nothing to a method that looks at no text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the place, the scheme, the calibration, the format."""
    parser.add_argument("model", metavar="MODEL", help="an alias, a .gguf file, a Hugging Face directory or a hub id")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write (with --format gguf: file)")
    scheme = parser.add_argument_group("what the codes look like")
    scheme.add_argument(
        "--method",
        choices=METHODS,
        default="gptq",
        help="gptq (default); awq; smoothquant, which is W8A8; rtn, which rounds to nearest at once",
    )
    scheme.add_argument("--bits", type=int, metavar="N", help="8, 4 (default) or 3")
    scheme.add_argument(
        "--group",
        type=_group,
        metavar="N",
        help="inputs that share a scale: 32 (gguf: always), 64 (default), 128, channel",
    )
    scheme.add_argument("--sym", action="store_true", help="no zero points: the middle code is 0")
    how = parser.add_argument_group("how gptq, awq and smoothquant find them")
    how.add_argument(
        "--recipe",
        choices=RECIPES,
        help="of gptq: best (default) joins what helps; gptaq goes some of the way to the original's outputs; plain is "
        "GPTQ as published",
    )
    how.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text, or .jsonl with "text" or "messages" a line (default: a text of Paceline\'s own)',
    )
    how.add_argument("--calibration-tokens", type=positive, metavar="N", help="most tokens of it (default 16384)")
    how.add_argument("--seed", type=int, metavar="N", help="which parts of it, and in what order (default 0)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=FORMATS,
        help="compressed-tensors (default; paceline for families that it is not written for), or another",
    )
    output.add_argument("--head-bits", type=int, metavar="N", help="round the output matrix too (gguf, paceline)")
    output.add_argument(
        "--force", action="store_true", help="replace OUT; it stays whole until the new one is complete"
    )


def execute(args: argparse.Namespace) -> int:
    """Quantises, writes, prints a table. ParameterError or OutputError before any work for what cannot be had."""
    from paceline.quantize.export.atomic import check_output
    from paceline.quantize.export.formats import check_format, default_format
    from paceline.quantize.export.write import check_source, write_model
    from paceline.quantize.pipeline import quantize_model
    from paceline.quantize.work import WorkDirectory
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.model_hash import model_hash

    started_s = time.monotonic()
    scheme = _scheme(args)
    _check_flags(args)
    path = fetch_model(args.model)
    checkpoint = open_checkpoint(path)
    args.format = args.format or default_format(checkpoint.config)
    check_format(checkpoint.config, scheme, args.format, head_bits=args.head_bits)
    check_output(args.out, force=args.force, source=path)
    check_source(checkpoint, args.format)
    settings, source = _settings(args, checkpoint, scheme)
    key = settings.key(model_hash(checkpoint.files))
    with WorkDirectory(work_path(args.out), key) as work:
        with Progress(f"Quantising {args.model}", estimate=True) as progress:
            model = quantize_model(checkpoint, settings, work, progress=progress.update)
        with Progress("Writing"):
            write_model(model, args.out, args.format, head_bits=args.head_bits, force=args.force)
        lines = _report(model, settings)
        work.remove()
    print("\n".join(lines))
    before, after = (sum(file.stat().st_size for file in files) for files in (checkpoint.files, _files(args.out)))
    seconds = time.monotonic() - started_s
    print(f"\n{args.out}: {_megabytes(after)}, from {_megabytes(before)}, in {seconds:.0f} s")
    if settings.tokens is not None:
        print(f"calibrated on {settings.tokens.size:,} tokens of {source}")
    print("what it costs: " + shlex.join(["paceline", "eval", str(args.out), "--reference", f"{args.model}:f32"]))
    return 0


def _scheme(args: argparse.Namespace) -> Scheme:
    """What was asked for; where nothing was, 4 bits and groups of 64 (of 32 in a GGUF file), and for SmoothQuant the
    only one there is."""
    from paceline.quantize.scheme import Scheme

    is_w8a8 = args.method == "smoothquant"
    bits = (8 if is_w8a8 else 4) if args.bits is None else args.bits
    group = args.group or ("channel" if is_w8a8 else "32" if args.format == "gguf" else "64")
    return Scheme(args.method, bits, None if group == "channel" else int(group), args.sym or is_w8a8)


def _check_flags(args: argparse.Namespace) -> None:
    if args.method == "rtn":
        for field, flag in CALIBRATED_ONLY.items():
            if getattr(args, field) is not None:
                raise ParameterError(field, getattr(args, field), f"rtn looks at no text: leave {flag} out")
    if args.method != "gptq" and args.recipe is not None:
        raise ParameterError("recipe", args.recipe, "given with --method gptq only (--recipe)")


def work_path(out: Path) -> Path:
    """Where unfinished work for ``out`` lies: beside it, hidden."""
    target = out.resolve()
    return target.with_name(f".{target.name}.unfinished")


def _settings(args: argparse.Namespace, checkpoint: Checkpoint, scheme: Scheme) -> tuple[Settings, str]:
    """And what the tokens are of."""
    from paceline.quantize.calibration import DEFAULT_TOKENS, read_calibration
    from paceline.quantize.pipeline import Settings
    from paceline.quantize.recipe import Recipe
    from paceline.text.chat import load_chat_template
    from paceline.text.tokenizer import load_tokenizer

    if args.method == "rtn":
        return Settings(scheme, Recipe()), ""
    calibration = read_calibration(
        args.calibration,
        load_tokenizer(checkpoint),
        load_chat_template(checkpoint),
        num_tokens=args.calibration_tokens or DEFAULT_TOKENS,
        seed=args.seed or 0,
    )
    recipe = Recipe.named(args.recipe or "best") if args.method == "gptq" else Recipe()
    return Settings(scheme, recipe, calibration.tokens), calibration.source


def _report(model: FinishedModel, settings: Settings) -> list[str]:
    """A line for each kind of matrix: number, bytes before and after, error."""
    kinds: dict[str, list[tuple[int, int, float]]] = {}
    for name in model.checkpoint.names():
        matrix = model.matrix(name)
        if matrix is not None:
            size = model.checkpoint.tensor(name).data.nbytes
            kinds.setdefault(name.split(".")[2], []).append((size, matrix.num_bytes, model.error(name)))
    rows = []
    for kind, found in kinds.items():
        before, after, errors = zip(*found, strict=True)
        rows.append(
            (
                kind,
                str(len(found)),
                _megabytes(sum(before)),
                _megabytes(sum(after)),
                f"{sum(errors) / len(errors):.2%}",
                f"{max(errors):.2%}",
            )
        )
    what = "weights" if settings.tokens is None else "outputs"
    header = ("matrices", "layers", "before", "after", f"error of {what}", "worst")
    head, *rest = table(header, rows, right=frozenset({1, 2, 3, 4, 5}))
    return [bold(head, sys.stdout), *rest]


def _files(out: Path) -> list[Path]:
    return [out] if out.is_file() else [path for path in out.iterdir() if path.is_file()]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _group(text: str) -> str:
    if text != "channel" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of inputs nor channel")
    return text
