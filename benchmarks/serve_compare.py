"""Paceline's server beside llama.cpp's, or any that run already: the same load through the same client, in turns.

Servers that this program starts run with the same number of threads, and start anew for each concurrency with as many
slots, which is the best that llama.cpp can be given. In a round every server has the load once, one after the other;
the first round warms up. A figure is the median of the rounds, and "times" the median over rounds of how much better
the first server was.

The client runs on the same cores: its share of them is in the document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import PacelineError, ParameterError
from paceline.machine import detect_machine
from paceline.measure.record import environment
from paceline.measure.serving.benchmark import ServingBenchmark
from paceline.measure.serving.client import Endpoint
from paceline.measure.serving.drive import Load
from paceline.measure.serving.jobs import Job, read_jobs
from paceline.weights.catalog import resolve_model

START_S = 120.0
"""Longest that a server may take to be ready."""

POLL_S = 0.05
PAUSE_S = 0.5
"""Between jobs: threads of the last server that still spin must have gone to sleep."""

FIGURES = {
    "output_tokens_per_s": ("output tok/s", True),
    "ttft_p50_ms": ("TTFT p50 ms", False),
    "ttft_p95_ms": ("TTFT p95 ms", False),
    "tpot_p50_ms": ("TPOT p50 ms", False),
    "chunk_gap_p99_ms": ("chunk gap p99 ms", False),
    "e2e_p50_ms": ("E2E p50 ms", False),
}
"""What is compared -> its title, and whether more is better."""


@dataclass(frozen=True)
class Program:
    """A server that can be started: its command without the port, and the path that answers 200 when it is ready."""

    command: Sequence[str]
    ready_path: str


def paceline_program(model: Path, *, threads: int, slots: int, flags: Sequence[str]) -> Program:
    """Paceline's own server."""
    sizes = ["--threads", str(threads), "--max-batch", str(slots)]
    command = [sys.executable, "-m", "paceline", "serve", str(model), *sizes, *flags]
    return Program(command, "/health/ready")


def llama_program(
    model: Path, *, executable: str, threads: int, slots: int, slot_tokens: int, flags: Sequence[str]
) -> Program:
    """llama.cpp's ``llama-server``; its context is divided among the slots."""
    sizes = ["-t", str(threads), "-np", str(slots), "-c", str(slots * slot_tokens)]
    command = [executable, "-m", str(model), *sizes, "-fa", "on", "--host", "127.0.0.1", *flags]
    return Program(command, "/health")


@contextlib.contextmanager
def started(name: str, program: Program) -> Iterator[str]:
    """The address of a server that runs until the block ends. Raises ``ServerError`` where it does not get ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        command = [*program.command, "--port", str(port)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:
            raise ServerError(f"{name} cannot be started: {error}") from error
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(name, process, url + program.ready_path, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class ServerError(PacelineError):
    """A server does not start."""


def _wait_until_ready(name: str, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    give_up_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()[-3:]
    reason = "is not ready" if process.returncode is None else f"ended with status {process.returncode}"
    raise ServerError(f"{name} {reason}: {' / '.join(said)}")


def measured(document: dict[str, Any]) -> dict[str, float]:
    """The figures of one run. Raises ``ServerError`` where a request failed: such a run is not comparable."""
    if document["requests"]["succeeded"] != document["requests"]["sent"] or not document["requests"]["sent"]:
        raise ServerError(f"{document['url']}: {document['requests']}, {document['errors']}")
    latency = document["latency_ms"]
    figures = {"output_tokens_per_s": document["rates"]["output_tokens_per_s"]}
    for name in FIGURES:
        key, _, percentile = name.removesuffix("_ms").rpartition("_")
        if key in latency and latency[key][percentile] is not None:
            figures[name] = latency[key][percentile]
    return figures


def compared(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """By server, then figure: the median of the rounds, all of them, and how many times better the first server was."""
    first = next(iter(rounds[0]))
    result: dict[str, dict[str, Any]] = {}
    for server in rounds[0]:
        result[server] = {}
        for name, (_, more_is_better) in FIGURES.items():
            pairs = [
                (one[first][name], one[server][name]) for one in rounds if name in one[first] and name in one[server]
            ]
            if not pairs:
                continue
            times = [(ours / theirs if more_is_better else theirs / ours) for ours, theirs in pairs if ours and theirs]
            values = [theirs for _, theirs in pairs]
            result[server][name] = {
                "median": statistics.median(values),
                "runs": values,
                "times": statistics.median(times) if times else None,
            }
    return result


def table(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Lines for a person: a row a concurrency and server."""
    width = max(18, *(len(server) + 2 for by_server in results.values() for server in by_server))
    lines = [f"{'':>4}  {'':<{width}}" + "".join(f"{title:>24}" for title, _ in FIGURES.values())]
    for concurrency, by_server in results.items():
        for server, figures in by_server.items():
            cells = []
            for name in FIGURES:
                row = figures.get(name)
                times = "" if row is None or row["times"] is None else f" ({row['times']:.2f}x)"
                cells.append(f"{'-' if row is None else format(row['median'], ',.1f') + times:>24}")
            lines.append(f"{concurrency:>4}  {server:<{width}}" + "".join(cells))
    lines.append("(n x): how many times better the first server is")
    return lines


@dataclass(frozen=True)
class Comparison:
    """The load, and the servers: those that run already by address, the others by how to start them."""

    args: argparse.Namespace
    jobs: list[Job] | None

    def run(self) -> dict[str, Any]:
        """By concurrency what ``compared`` gives, the largest share of a core that the client took, and the commands of
        the servers that were started."""
        results, client, commands = {}, {}, {}
        for concurrency in self.args.concurrency:
            with contextlib.ExitStack() as stack:
                urls = dict(self.args.server)
                for name, program in self._programs(concurrency).items():
                    progress(f"starting {name}")
                    commands[f"{name}, {concurrency}"] = shlex.join(program.command)
                    urls[name] = stack.enter_context(started(name, program))
                rounds, shares = [], []
                for index in range(self.args.runs + 1):  # the first one warms up
                    documents = {name: self._measure(name, url, concurrency, index) for name, url in urls.items()}
                    if index > 0:
                        rounds.append({name: measured(document) for name, document in documents.items()})
                        shares += [document["client"]["cpu_share"] for document in documents.values()]
            results[str(concurrency)] = compared(rounds)
            client[str(concurrency)] = max(shares)
        progress("")
        return {"results": results, "client_cpu_share": client, "commands": commands}

    def _programs(self, slots: int) -> dict[str, Program]:
        args, programs = self.args, {}
        if args.paceline is not None:
            flags = shlex.split(args.paceline)
            programs["paceline"] = paceline_program(args.file, threads=args.threads, slots=slots, flags=flags)
        if args.llama_server is not None:
            programs["llama.cpp"] = llama_program(
                args.llama_file or args.file,
                executable=args.llama_server,
                threads=args.threads,
                slots=slots,
                slot_tokens=args.slot_tokens,
                flags=shlex.split(args.llama_flags),
            )
        return programs

    def _measure(self, name: str, url: str, concurrency: int, index: int) -> dict[str, Any]:
        progress(f"{concurrency} at a time: round {index} of {self.args.runs}, {name}")
        time.sleep(PAUSE_S)
        fields = {"temperature": 0.0, "ignore_eos": True}
        benchmark = ServingBenchmark(
            Endpoint(url, "chat", max_tokens=self.args.max_tokens, fields=fields),
            # Another seed, other prompts: none is in a prefix cache from an earlier round.
            Load(concurrency=concurrency, seed=1000 * concurrency + index),
            self.jobs,
            prompt_tokens=self.args.prompt_tokens,
            num_requests=self.args.requests or max(8, 2 * concurrency),
            num_warm_up=0,
        )
        outcome = asyncio.run(benchmark.run(stopping=contextlib.nullcontext(asyncio.Event()), report=lambda *_: None))
        return outcome.document()


def progress(text: str) -> None:
    """The current activity, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias or GGUF file that started servers run")
    parser.add_argument("--paceline", metavar="FLAGS", help="start Paceline's server with these flags ('' for none)")
    parser.add_argument("--llama-server", metavar="PATH", help="start this llama-server")
    parser.add_argument("--llama-flags", default="", metavar="FLAGS", help="more flags for it")
    parser.add_argument("--llama-file", type=Path, metavar="FILE", help="another GGUF file for it: its best format")
    parser.add_argument("--slot-tokens", type=int, default=1024, metavar="N", help="context of each of its slots")
    parser.add_argument(
        "--server", type=_named, action="append", default=[], metavar="NAME=URL", help="a server that runs already"
    )
    parser.add_argument("--threads", type=int, default=detect_machine().num_threads, metavar="N")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="in each run (default: twice the concurrency, 8 at least)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="of prompts that are made up")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="prompts instead; from the second round on caches know them"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens of each answer, exactly")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="rounds that count (default 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the JSON document")
    args = parser.parse_args(arguments)
    if len(args.server) + (args.paceline is not None) + (args.llama_server is not None) == 0:
        parser.error("name a server: --paceline '', --llama-server PATH or --server NAME=URL")
    if args.runs < 1:
        raise ParameterError("runs", args.runs, "1 or more")
    starts = args.paceline is not None or args.llama_server is not None
    args.file = resolve_model(args.model) if starts else None
    return args


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    return name, url


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: a table, then one JSON document as the last line."""
    args = parse(arguments)
    found = Comparison(args, read_jobs(args.data) if args.data is not None else None).run()
    document = {
        "metric": "serve_comparison",
        "model": None if args.file is None else args.file.name,
        "threads": args.threads,
        "rounds": args.runs,
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        **found,
        "environment": environment(),
    }
    print("\n".join(table(found["results"])))
    line = json.dumps(document, allow_nan=False, ensure_ascii=False)
    if args.output is not None:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PacelineError as error:
        sys.exit(f"error: {error}")
