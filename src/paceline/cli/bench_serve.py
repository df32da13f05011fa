"""`paceline bench serve`: latencies and throughput of any OpenAI-compatible server under a load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import positive
from paceline.cli.terminal import Progress, bold, dim, table
from paceline.errors import ParameterError, UnsupportedError
from paceline.measure.plot_file import check_plot_file

if TYPE_CHECKING:
    from paceline.measure.serving.benchmark import Outcome, ServingBenchmark
    from paceline.measure.serving.jobs import Job

TEXT = "what a server's clients wait for: latencies and tokens a second under a load"

BUSY_SHARE = 0.8
"""A client that uses more of a core is likely to measure itself."""


def add_workload(workloads: Any) -> None:
    """The sub-command ``serve`` with its flags."""
    parser = workloads.add_parser("serve", help=TEXT, description=f"Measures {TEXT}.")
    parser.add_argument("--url", required=True, metavar="URL", help="the server: http://host:port, or with its prefix")
    parser.add_argument("--model", metavar="NAME", help="the model's name there (default: the only one it serves)")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat", help="endpoint (default chat)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first line is the API key")
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    goodput = parser.add_argument_group("goodput", "answers that keep every limit given count")
    for flag, text in (
        ("--ttft-ms", "time to the first token"),
        ("--tpot-ms", "time per output token after it"),
        ("--gap-ms", "longest gap between two chunks"),
        ("--e2e-ms", "time to the last token"),
    ):
        goodput.add_argument(flag, type=float, metavar="MS", help=f"{text}, at most")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument(
        "--names",
        choices=("vllm", "guidellm", "aiperf", "all", "none"),
        default="all",
        help="also name each latency as these tools do (default all)",
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw distributions and the course: .html, .svg or .png"
    )
    output.add_argument("--record", type=Path, metavar="FILE", help="append the JSON document to FILE")


def execute(args: argparse.Namespace) -> int:
    """Measures, prints, draws; 1 where no request succeeded or the server went away, 130 after Ctrl-C."""
    if args.plot is not None:
        check_plot_file(args.plot)
    try:
        outcome = _measure(args)
    except ImportError as error:
        raise UnsupportedError(f"{error}: install what the client needs with `pip install paceline[serve]`") from error
    document = outcome.document()
    if args.record is not None:
        with args.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
    if args.plot is not None:
        _plot(args.plot, outcome, document)
    if args.json:
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(summary(document, names=args.names)))
    if document["stopped"] == "interrupted":
        return 130
    return 0 if document["requests"]["succeeded"] and document["stopped"] is None else 1


def summary(document: Mapping[str, Any], *, names: str = "all") -> list[str]:
    """The figures for a person."""
    rates, requests, tokens = document["rates"], document["requests"], document["tokens"]
    lines = [
        f"{bold('output', sys.stdout)}          {rates['output_tokens_per_s']:,.1f} tok/s"
        f"  (with prompts {rates['total_tokens_per_s']:,.1f}), {rates['requests_per_s']:,.2f} requests/s",
        *latency_table(document, names=names),
        f"requests        {requests['succeeded']:,} of {requests['sent']:,} succeeded in {document['wall_s']:.1f} s"
        + (f", {requests['unfinished']:,} unfinished" if requests["unfinished"] else ""),
        f"tokens          {tokens['prompt']:,} in prompts ({tokens['cached']:,} cached), "
        f"{tokens['output']:,} in answers",
    ]
    if uncounted := tokens["counted_by_chunks"]:
        lines.append(f"                the server sent no usage for {uncounted:,} answers: their chunks were counted")
    if "goodput_requests_per_s" in rates:
        limits = ", ".join(f"{name.removesuffix('_ms')} {ms:g} ms" for name, ms in document["limits_ms"].items())
        lines.append(f"goodput         {rates['goodput_requests_per_s']:,.2f} requests/s within {limits}")
    lines += [
        f"{'failed' if at == 0 else '':<16}{error['count']:,} × {kind}: {error['example']}"
        for at, (kind, error) in enumerate(document["errors"].items())
    ]
    if document["stopped"] is not None:
        lines.append(f"stopped early   {document['stopped']}")
    return [*lines, *_client_lines(document["client"]), dim(_what_ran(document), sys.stdout)]


def latency_table(document: Mapping[str, Any], *, names: str) -> list[str]:
    """A row a latency, in milliseconds, and what other tools call it."""
    from paceline.measure.serving.exchange import LATENCIES, NAMES

    tools = NAMES if names == "all" else tuple(tool for tool in NAMES if tool == names)
    rows = []
    for key, latency in LATENCIES.items():
        figures = document["latency_ms"][key]
        cells = ["-" if figures[at] is None else f"{figures[at]:,.1f}" for at in ("mean", "p50", "p95", "p99")]
        rows.append([latency.title, *cells, *(latency.names.get(tool, "-") for tool in tools)])
    header = ["ms", "mean", "p50", "p95", "p99", *(f"in {tool}" for tool in tools)]
    return table(header, rows, right=frozenset(range(1, 5)))


def _client_lines(client: Mapping[str, Any]) -> list[str]:
    lines = [f"client          {client['cpu_share']:.0%} of one core"]
    if late := client["lateness_ms"]:
        shown = (
            "nothing sent" if late["p99"] is None else f"sent {late['p50']:.1f} ms late (p50), {late['p99']:.1f} (p99)"
        )
        lines[0] += f"; {shown}"
    if client["cpu_share"] > BUSY_SHARE:
        lines.append("                it may be the client that is slow: the figures are bounds of the server's")
    return lines


def _what_ran(document: Mapping[str, Any]) -> str:
    load = document["load"]
    kinds = {
        "closed": f"{load['concurrency']} at a time",
        "poisson": f"{load['rate']} a second at random times",
        "trace": "at the times of the trace",
    }
    return f"{document['model']} at {document['url']}, {document['api']}, {kinds[load['kind']]}"


def _add_load(group: Any) -> None:
    how = group.add_mutually_exclusive_group(required=True)
    how.add_argument("--concurrency", type=positive, metavar="N", help="closed loop: N requests at a time")
    how.add_argument("--rate", type=float, metavar="R", help="open loop: R requests a second at random (Poisson) times")
    how.add_argument("--trace", action="store_true", help="open loop: at the times in --data")
    group.add_argument("--requests", type=positive, metavar="N", help="requests (default: those of --data, or 100)")
    group.add_argument("--duration", type=float, metavar="S", help="send none after S seconds; running ones may end")
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before it starts (default 1)")
    group.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="times the lengths of a trace")
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="times the rate of a trace")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the times and of prompts that are made up")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait for an answer (600)")


def _add_requests(group: Any) -> None:
    group.add_argument(
        "--data", type=Path, metavar="FILE", help="JSON lines with messages, prompt, turns or question; or a trace"
    )
    group.add_argument("--prompt-tokens", type=positive, default=128, metavar="N", help="without --data (default 128)")
    group.add_argument("--max-prompt-tokens", type=positive, metavar="N", help="leave out longer prompts of a trace")
    group.add_argument(
        "--max-tokens", "--new-tokens", type=positive, metavar="N", help="longest answer (default: the trace's, or 128)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="send ignore_eos; not every server knows it")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    group.add_argument("--extra", metavar="JSON", help="an object whose fields are added to every request")


def _measure(args: argparse.Namespace) -> Outcome:
    benchmark = _benchmark(args)
    with Progress("Requests", benchmark.total) as progress:
        return asyncio.run(benchmark.run(stopping=_interrupted(), report=progress.update))


@contextlib.contextmanager
def _interrupted() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets, so that what was measured so far is still shown."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, event.set)
    try:
        yield event
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _benchmark(args: argparse.Namespace) -> ServingBenchmark:
    from paceline.measure.serving.benchmark import ServingBenchmark
    from paceline.measure.serving.client import Endpoint
    from paceline.measure.serving.drive import Load
    from paceline.measure.serving.figures import Limits

    if args.warmup < 0:
        raise ParameterError("warmup", args.warmup, "0 or more requests")
    jobs, source = _jobs(args)
    return ServingBenchmark(
        Endpoint(
            args.url,
            args.api,
            args.model,
            _key(args.api_key_file),
            max_tokens=128 if args.max_tokens is None else args.max_tokens,
            fields=_fields(args),
            timeout_s=args.timeout,
        ),
        Load(args.concurrency, args.rate, args.trace, args.duration, args.seed),
        jobs,
        prompt_tokens=args.prompt_tokens,
        num_requests=args.requests,
        num_warm_up=args.warmup,
        limits=Limits(args.ttft_ms, args.tpot_ms, args.gap_ms, args.e2e_ms),
        source=source,
    )


def _jobs(args: argparse.Namespace) -> tuple[list[Job] | None, dict[str, Any]]:
    """The requests of ``--data``, and what the document says of them."""
    import dataclasses

    from paceline.measure.serving.jobs import read_jobs, shorter_than

    for name in ("length_scale", "rate_scale"):
        if not getattr(args, name) > 0:
            raise ParameterError(name, getattr(args, name), "a number above 0")
    if args.data is None:
        return None, {"file": None, "prompt_tokens": args.prompt_tokens}
    jobs = read_jobs(args.data, length_scale=args.length_scale, rate_scale=args.rate_scale)
    source = {"file": args.data.name, "length_scale": args.length_scale, "rate_scale": args.rate_scale, "left_out": 0}
    if args.max_prompt_tokens is not None:
        kept = shorter_than(jobs, args.max_prompt_tokens)
        source["left_out"] = len(jobs) - len(kept)
        jobs = kept
    if not jobs:
        raise ParameterError("max_prompt_tokens", args.max_prompt_tokens, "as much as one prompt of --data needs")
    if args.max_tokens is not None:
        jobs = [dataclasses.replace(job, max_tokens=args.max_tokens) for job in jobs]
    return jobs, source


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    if not 0 <= args.temperature < math.inf:
        raise ParameterError("temperature", args.temperature, "a number from 0 on")
    fields: dict[str, Any] = {"temperature": args.temperature}
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.extra is not None:
        try:
            extra = json.loads(args.extra)
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ParameterError("extra", args.extra, 'a JSON object such as {"top_k": 20}')
        fields |= extra
    return fields


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8").split()
    if not lines:
        raise ParameterError("api_key_file", str(path), "a file whose first line is a key")
    return lines[0]


def _plot(path: Path, outcome: Outcome, document: Mapping[str, Any]) -> None:
    from paceline.measure.serving.plot import Drawing, draw_png, draw_svg

    title = f"{document['model']}: {document['rates']['output_tokens_per_s']:,.1f} output tokens a second"
    run = outcome.run
    drawing = Drawing.of(run.exchanges, run.started_s, run.ended_s, title=title, note=_what_ran(document))
    if path.suffix == ".png":
        draw_png(drawing, path)
        return
    svg = draw_svg(drawing)
    html = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title>{svg}'
    path.write_text(html if path.suffix == ".html" else svg, encoding="utf-8")
