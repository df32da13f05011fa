"""Paceline beside llama.cpp and Transformers: the same file, prompts, lengths and threads, in turns.

Each engine lives in a process of its own (engines.py) for all workloads. A round runs one job on each engine after the
other, so a machine that slows down for a while slows all of them; the figure is the median of the rounds, and "times"
the median over rounds of Paceline's figure over the peer's.

Definitions: decode is (n-1) / (last token - first token), prefill prompt tokens / time to the first token, batch all
output tokens / time to the last one. Start is from the start of a fresh process to its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from engines import ENGINES
from worker import EngineError, Worker, measure_start

from paceline.errors import PacelineError
from paceline.machine import detect_machine
from paceline.measure.prompts import Encoder, prompt_tokens
from paceline.measure.record import environment
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint

NEEDS = {
    "paceline": (),
    "llama.cpp": ("llama_cpp",),
    "transformers": ("torch", "transformers", "gguf", "accelerate"),
}
"""Modules that an engine needs."""

WORKER = Path(__file__).with_name("engines.py")
PAUSE_S = 0.2
"""Between jobs: threads of the last engine that still spin must have gone to sleep."""


@dataclass(frozen=True)
class Workload:
    """``num_requests`` prompts of ``num_prompt`` tokens, the first ``num_shared`` the same in all; ``num_new`` new ones
    each, ``concurrency`` at a time."""

    name: str
    kind: Literal["decode", "prefill", "batch", "start"]
    num_prompt: int
    num_new: int
    num_requests: int = 1
    concurrency: int = 1
    num_shared: int = 0

    def job(self, encoder: Encoder, round_index: int) -> dict[str, Any]:
        """The job of a round. No two prompts of a workload begin alike, but for what those of a job share, so no engine
        can have one in a cache."""
        offsets = [round_index * self.num_requests + index for index in range(self.num_requests)]
        shared = prompt_tokens(encoder, self.num_shared, offset=round_index)
        prompts = [shared + prompt_tokens(encoder, self.num_prompt - self.num_shared, offset=at) for at in offsets]
        return {"prompts": prompts, "num_new": self.num_new, "concurrency": self.concurrency}

    def figure(self, result: dict[str, Any]) -> float:
        """Tokens a second."""
        first_s, total_s = float(result["first_s"] or 0.0), float(result["total_s"])
        if self.kind == "decode":
            return (self.num_new - 1) / (total_s - first_s)
        if self.kind == "prefill":
            return self.num_prompt / first_s
        return self.num_requests * self.num_new / total_s


WORKLOADS = (
    Workload("decode", "decode", 64, 256),
    Workload("decode-deep", "decode", 4096, 256),
    Workload("prefill", "prefill", 1024, 1),
    Workload("batch-8", "batch", 128, 128, num_requests=64, concurrency=8),
    Workload("batch-32", "batch", 128, 128, num_requests=64, concurrency=32),
    Workload("prefix", "batch", 1056, 32, num_requests=32, concurrency=8, num_shared=1024),
    Workload("start", "start", 64, 16),
)


def smaller(workload: Workload, divisor: int) -> Workload:
    """The same with lengths and numbers divided, for trying the program out."""

    def part(value: int, least: int) -> int:
        return min(value, max(least, value // divisor))

    return Workload(
        workload.name,
        workload.kind,
        part(workload.num_prompt, 8),
        part(workload.num_new, 4),
        part(workload.num_requests, 2),
        part(workload.concurrency, 2),
        workload.num_shared // divisor,
    )


@dataclass
class Comparison:
    """What is compared, and what came out: figures by workload and engine, one a round."""

    names: list[str]
    commands: dict[str, list[str]]
    env: dict[str, str]
    encoder: Encoder
    text: str
    num_rounds: int
    engines: dict[str, dict[str, Any]]
    left_out: dict[str, str]
    figures: dict[str, dict[str, list[float]]]
    answers: dict[str, dict[str, list[int]]]

    def run(self, workloads: Sequence[Workload]) -> None:
        """All workloads; start comes first, while nothing else is in memory."""
        for workload in workloads:
            if workload.kind == "start":
                self._run_start(workload)
        if all(workload.kind == "start" for workload in workloads):
            return
        workers: dict[str, Worker] = {}
        try:
            for name in self.names:
                progress(f"loading {name}")
                try:
                    workers[name] = Worker(name, self.commands[name], self.env)
                except EngineError as error:
                    self._leave_out(name, str(error))
                    continue
                self.engines[name] = {"version": workers[name].version, "path": workers[name].path}
            for workload in workloads:
                if workload.kind != "start":
                    self._run_workload(workload, workers)
        finally:
            for worker in workers.values():
                worker.close()

    def _run_workload(self, workload: Workload, workers: dict[str, Worker]) -> None:
        able = dict(workers)
        for index in range(self.num_rounds + 1):  # the first one warms up
            job = workload.job(self.encoder, index)
            for name in list(able):
                progress(f"{workload.name}: round {index} of {self.num_rounds}, {name}")
                time.sleep(PAUSE_S)
                try:
                    result = able[name].run(job)
                except EngineError as error:
                    self._leave_out(f"{name} {workload.name}", str(error))
                    del able[name]
                    self.figures[workload.name].pop(name, None)
                    continue
                if index > 0:
                    self.figures[workload.name].setdefault(name, []).append(workload.figure(result))
                    self.answers[workload.name].setdefault(name, result["tokens"])

    def _run_start(self, workload: Workload) -> None:
        able = list(self.names)
        for index in range(self.num_rounds + 1):  # the first one brings files into the page cache
            job = {**workload.job(self.encoder, 0), "text": self.text}
            for name in list(able):
                progress(f"{workload.name}: round {index} of {self.num_rounds}, {name}")
                try:
                    first_s, peak_bytes = measure_start([*self.commands[name], "--once"], self.env, job)
                except EngineError as error:
                    self._leave_out(f"{name} {workload.name}", str(error))
                    able.remove(name)
                    for figures in (self.figures["start_s"], self.figures["peak_mb"]):
                        figures.pop(name, None)
                    continue
                if index > 0:
                    self.figures["start_s"].setdefault(name, []).append(first_s)
                    if peak_bytes is not None:
                        self.figures["peak_mb"].setdefault(name, []).append(peak_bytes / 1e6)

    def _leave_out(self, what: str, reason: str) -> None:
        self.left_out[what] = reason
        progress("")
        print(f"{what} is left out: {reason}", file=sys.stderr)

    def document(self) -> dict[str, Any]:
        """All results as plain data."""
        results = {}
        for name, by_engine in self.figures.items():
            if not by_engine:
                continue
            first = next(iter(by_engine))
            results[name] = {
                engine: {
                    "median": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                    "runs": values,
                    "times": times(by_engine[first], values, lower_is_better=name in ("start_s", "peak_mb")),
                    "equal_tokens": common_start(self.answers, name, first, engine),
                }
                for engine, values in by_engine.items()
            }
        return {"engines": self.engines, "left_out": self.left_out, "results": results}


def times(ours: Sequence[float], theirs: Sequence[float], *, lower_is_better: bool) -> float:
    """How many times better ours is than theirs: the median of the rounds' ratios."""
    ratios = [b / a if lower_is_better else a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ratios)


def common_start(answers: dict[str, dict[str, list[int]]], workload: str, first: str, engine: str) -> int | None:
    """How many tokens of the answers agree from the beginning; None where there are none."""
    if engine not in answers.get(workload, {}):
        return None
    pairs = list(zip(answers[workload][first], answers[workload][engine], strict=True))
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))


def table(document: dict[str, Any]) -> list[str]:
    """The figures as lines for a person: a row a workload, a pair of columns an engine."""
    results = document["results"]
    names = list(dict.fromkeys(engine for by_engine in results.values() for engine in by_engine))
    width = max([18, *(len(name) + 2 for name in names)])
    lines = [f"{'':<14}" + "".join(f"{name:>{width}}" for name in names)]
    for workload, by_engine in results.items():
        cells = []
        for name in names:
            row = by_engine.get(name)
            digits = 2 if workload == "start_s" else 0
            shown = "-" if row is None else f"{row['median']:,.{digits}f} ({row['times']:.2f}x)"
            cells.append(f"{shown:>{width}}")
        lines.append(f"{workload:<14}" + "".join(cells))
    lines.append("tokens a second, start in seconds, memory in MB; (n x): how many times better the first column is")
    return lines


def progress(text: str) -> None:
    """The current activity, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def missing(name: str, model: Path) -> str | None:
    """Why that engine cannot take part, None when it can."""
    lacking = [module for module in NEEDS[name] if find_spec(module) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed"
    return "it reads GGUF files only" if name == "llama.cpp" and model.is_dir() else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description="Paceline beside other engines: same work, in turns.")
    parser.add_argument("--model", default="smollm2-135m", help="alias, .gguf file or Hugging Face directory")
    parser.add_argument(
        "--engines",
        default=",".join(ENGINES),
        help="comma-separated; paceline:ISA forces an instruction set (default: %(default)s)",
    )
    known = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", default=",".join(known), help="comma-separated (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="rounds after a warm-up (default 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="of every engine (default: what Paceline detects)")
    parser.add_argument("--weights", help="of Paceline; the peers keep the file's")
    parser.add_argument("--speculate", default="off", help="drafts of Paceline; the peers have none (default: off)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of Transformers")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="divide all sizes, to try the program out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the JSON document to this file too")
    args = parser.parse_args(arguments)
    for number in ("runs", "shrink", "threads"):
        if getattr(args, number) is not None and getattr(args, number) < 1:
            parser.error(f"--{number} must be positive")
    args.engines = args.engines.split(",")
    for engine in args.engines:
        base, colon, _ = engine.partition(":")
        if base not in ENGINES or (colon and base != "paceline"):
            parser.error(f"unknown engine {engine!r}; there are {', '.join(ENGINES)} and paceline:ISA")
    chosen = args.workloads.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(known)}")
    args.workloads = [smaller(workload, args.shrink) for workload in WORKLOADS if workload.name in chosen]
    return args


def prepare(args: argparse.Namespace) -> Comparison:
    """The comparison that the options ask for, without the engines that cannot take part."""
    model = resolve_model(args.model)
    threads = args.threads or detect_machine().num_threads
    encoder = load_tokenizer(open_checkpoint(model))
    comparison = Comparison(
        names=[],
        commands={},
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        encoder=encoder,
        text=encoder.decode(prompt_tokens(encoder, 64)),
        num_rounds=args.runs,
        engines={},
        left_out={},
        figures={name: {} for name in ("start_s", "peak_mb", *(work.name for work in args.workloads))},
        answers={work.name: {} for work in args.workloads},
    )
    for name in args.engines:
        base, _, isa = name.partition(":")
        if reason := missing(base, model):
            comparison._leave_out(name, reason)
            continue
        command = [sys.executable, str(WORKER), base, str(model), "--threads", str(threads), "--dtype", args.dtype]
        command += ["--isa", isa] if isa else []
        if base == "paceline":
            command += ["--speculate", args.speculate]
            command += ["--weights", args.weights] if args.weights else []
        comparison.names.append(name)
        comparison.commands[name] = command
    return comparison


def main(arguments: list[str] | None = None) -> int:
    """The command: a table, then one JSON document as the last line."""
    args = parse(arguments)
    comparison = prepare(args)
    comparison.run(args.workloads)
    progress("")
    document = {
        "metric": "comparison",
        "model": resolve_model(args.model).name,
        "threads": int(comparison.env["OMP_NUM_THREADS"]),
        "rounds": args.runs,
        "shrink": args.shrink,
        **comparison.document(),
        "environment": environment(),
    }
    print("\n".join(table(document)))
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
