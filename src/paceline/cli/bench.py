"""Measures this machine: decode, prefill, batch, verify-cost; each figure comes with the machine's limit."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import add_engine_arguments, add_model_argument, engine_config, positive
from paceline.cli.run import path_text
from paceline.cli.session import fetch_model, open_model
from paceline.cli.terminal import Progress, bold, dim
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.measure.record import Measurement
    from paceline.measure.roofline import Traffic

NAME = "bench"
HELP = "measure decode, prefill, batch or verify-cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a workload."""
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True, parser_class=type(parser))
    decode = _workload(workloads, "decode", "tokens a second of one request while it generates", runs=5)
    start = decode.add_mutually_exclusive_group()
    start.add_argument(
        "--prompt-tokens", type=positive, default=64, metavar="N", help="tokens in the prompt (default 64)"
    )
    decode.add_argument("--new-tokens", type=positive, default=256, metavar="N", help="tokens generated (default 256)")
    start.add_argument(
        "--depth", type=positive, metavar="N", help="tokens in the cache before it starts, instead of --prompt-tokens"
    )
    prefill = _workload(workloads, "prefill", "prompt tokens a second until the first token", runs=5)
    prefill.add_argument(
        "--prompt-tokens", type=positive, default=1024, metavar="N", help="tokens in the prompt (default 1024)"
    )
    batch = _workload(workloads, "batch", "output tokens a second of many requests", runs=5)
    batch.add_argument("--requests", type=positive, default=64, metavar="N", help="requests (default 64)")
    batch.add_argument(
        "--concurrency", type=positive, default=32, metavar="N", help="requests that run at a time (default 32)"
    )
    batch.add_argument(
        "--prompt-tokens", type=positive, default=128, metavar="N", help="tokens in each prompt (default 128)"
    )
    batch.add_argument(
        "--new-tokens", type=positive, default=128, metavar="N", help="tokens of each answer (default 128)"
    )
    verify = _workload(workloads, "verify-cost", "the cost of a pass over 1 to 64 tokens, relative to one", runs=15)
    verify.add_argument("--depth", type=positive, default=64, metavar="N", help="tokens in the cache (default 64)")
    verify.add_argument("--max-rows", type=positive, default=64, metavar="N", help="largest pass (default 64)")


def execute(args: argparse.Namespace) -> int:
    """Measures, prints, and appends to the record where one was asked for."""
    measurement = {
        "decode": _decode,
        "prefill": _prefill,
        "batch": _batch,
        "verify-cost": _verify_cost,
    }[args.workload](args)
    document = measurement.document()
    if args.record is not None:
        from paceline.measure.record import write_record

        write_record(args.record, args.model, document)
    if args.json:
        import json

        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print("\n".join(summary(document)))
    return 0


def summary(document: Mapping[str, Any]) -> list[str]:
    """The figures for a person."""
    limit = document["limit"]
    unit = "ms" if document["metric"].endswith("_ms") else "tok/s"
    lines = [
        f"{bold(document['metric'], sys.stdout)}  {document['median']:,.1f} {unit}"
        f"  ({document['min']:,.1f} to {document['max']:,.1f} in {len(document['runs'])} runs)",
        f"limit here      {limit['limit_tokens_per_s']:,.0f} tok/s, of which {limit['fraction']:.0%} is reached: "
        f"{limit['bytes_per_token'] / 1e6:,.1f} MB a token at {limit['bandwidth_gb_s']:.1f} GB/s, "
        f"int8 peak {limit['int8_gops']:,.0f} GOPS",
    ]
    if relative := document.get("relative"):
        shown = ("1", "2", "4", "8", "16", "32", "64")
        lines.append("C(n)            " + "   ".join(f"{n}: {relative[n]:.2f}" for n in shown if n in relative))
    return [*lines, dim(path_text(document["path"]), sys.stdout)]


def _workload(workloads: Any, name: str, text: str, *, runs: int) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = workloads.add_parser(name, help=text, description=f"Measures {text}.")
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--runs", type=positive, default=runs, metavar="N", help=f"runs after a warm-up (default {runs})"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append the figures, machine and commit to FILE, one JSON document a line",
    )
    add_engine_arguments(parser)
    return parser


def _decode(args: argparse.Namespace) -> Measurement:
    from paceline.measure.load import measure_decode

    llm, _ = open_model(args.model, engine_config(args), verbose=args.verbose)
    with llm, Progress("Decoding", args.runs + 1) as progress:
        return measure_decode(
            llm,
            _traffic(args.model, llm.config),
            num_prompt=args.depth or args.prompt_tokens,
            num_new=args.new_tokens,
            num_runs=args.runs,
            report=progress.update,
        )


def _prefill(args: argparse.Namespace) -> Measurement:
    from paceline.measure.load import measure_prefill

    llm, _ = open_model(args.model, engine_config(args), verbose=args.verbose)
    with llm, Progress("Prefilling", args.runs + 1) as progress:
        return measure_prefill(
            llm,
            _traffic(args.model, llm.config),
            num_prompt=args.prompt_tokens,
            num_runs=args.runs,
            report=progress.update,
        )


def _batch(args: argparse.Namespace) -> Measurement:
    from paceline.measure.load import measure_batch

    if hasattr(args, "max_batch"):
        raise ParameterError(
            "max_batch", args.max_batch, "--concurrency sets it in this benchmark; leave --max-batch out"
        )
    config = engine_config(args)
    if not hasattr(args, "token_budget"):
        config = dataclasses.replace(config, token_budget=max(config.token_budget, args.concurrency))
    config = dataclasses.replace(config, max_batch=args.concurrency)
    llm, _ = open_model(args.model, config, verbose=args.verbose)
    with llm, Progress("Batches", args.runs + 1) as progress:
        return measure_batch(
            llm,
            _traffic(args.model, llm.config),
            num_requests=args.requests,
            num_prompt=args.prompt_tokens,
            num_new=args.new_tokens,
            num_runs=args.runs,
            report=progress.update,
        )


def _verify_cost(args: argparse.Namespace) -> Measurement:
    from paceline.measure.prompts import prompt_tokens
    from paceline.measure.roofline import model_traffic
    from paceline.measure.verify_cost import load_executor, measure_verify_cost
    from paceline.text.tokenizer import load_tokenizer
    from paceline.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(fetch_model(args.model))
    config = engine_config(args)
    with Progress(f"Loading {args.model}"):
        executor = load_executor(checkpoint, config, depth=args.depth, max_rows=args.max_rows)
        prompt = prompt_tokens(load_tokenizer(checkpoint), args.depth + args.max_rows)
    with Progress("Passes", args.runs + 1) as progress:
        return measure_verify_cost(
            executor,
            model_traffic(checkpoint, config),
            prompt,
            depth=args.depth,
            max_rows=args.max_rows,
            num_runs=args.runs,
            report=progress.update,
        )


def _traffic(model: str, config: EngineConfig) -> Traffic:
    from paceline.measure.roofline import model_traffic
    from paceline.weights.checkpoint import open_checkpoint

    return model_traffic(open_checkpoint(fetch_model(model)), config)
