"""What an executor's arithmetic costs: its next-token distributions against those of float32 arithmetic on the file's
own weights, over a text.

Notation: p, q the distributions of the reference and of the executor after each token of a window. KL = sum p log(p/q)
in nats. Perplexity is exp of the mean -log of the token that really follows, inside each window.

The reference dequantises the weights and computes in float32 throughout, keys and values included. The interval is a
bootstrap over blocks of 32 tokens in a row, since neighbours are alike.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from float32_reference import Float32Reference, Table, Tokens
from numpy.typing import NDArray

from paceline.config import KV_FORMATS, WEIGHT_FORMATS, EngineConfig, ModelConfig
from paceline.errors import PacelineError
from paceline.executors.base import Executor, StepPlan
from paceline.kv.layout import KVLayout, pages_for
from paceline.machine import detect_machine
from paceline.measure.record import environment
from paceline.sampling.rows import greedy_rows
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import Checkpoint

Logits = Callable[[int], Table]
"""Window -> its logits [tokens, vocabulary] f32, valid until the next call."""

EXCERPT = Path(__file__).with_name("excerpt.txt")
BLOCK_TOKENS = 32
NUM_RESAMPLES = 2000


def executor_logits(executor: Executor, windows: Tokens) -> Logits:
    """Each window as one sequence, in steps of as many rows as the executor takes; pages are used again."""

    def logits(window: int) -> Table:
        tokens = windows[window]
        table = np.zeros((len(tokens), executor.model.vocab_size), np.float32)
        chunk = min(executor.max_rows, executor.max_outputs)
        for start in range(0, len(tokens), chunk):
            rows = np.arange(start, min(start + chunk, len(tokens)), dtype=np.int32)
            plan = StepPlan(
                tokens=tokens[rows],
                positions=rows,
                row_starts=np.array([0, len(rows)], np.int32),
                page_table=np.arange(pages_for(len(tokens)), dtype=np.int32)[None],
                logit_rows=np.arange(len(rows), dtype=np.int32),
                samples=greedy_rows(len(rows)),
            )
            executor.run(plan)
            table[rows] = executor.logits()
        return table

    return logits


@dataclass(frozen=True)
class Divergence:
    """Of every token of some windows [windows, tokens]: KL, whether both prefer the same token, -log of the next token
    by each (one column less).
    """

    kl: NDArray[np.float64]
    same_top: NDArray[np.bool_]
    reference_loss: NDArray[np.float64]
    loss: NDArray[np.float64]


def log_softmax(logits: Table) -> NDArray[np.float64]:
    """In float64, along the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def diverge(reference: Logits, other: Logits, windows: Tokens) -> Divergence:
    """Compares two sources of logits on the same windows."""
    count, length = windows.shape
    kl, same = np.zeros((count, length)), np.zeros((count, length), np.bool_)
    losses = np.zeros((2, count, length - 1))
    for window in range(count):
        left, right = reference(window), other(window)
        for start in range(0, length, BLOCK_TOKENS):  # in parts: two float64 tables of a large vocabulary are too much
            rows = slice(start, min(start + BLOCK_TOKENS, length))
            log_p, log_q = log_softmax(left[rows]), log_softmax(right[rows])
            kl[window, rows] = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
            same[window, rows] = log_p.argmax(axis=1) == log_q.argmax(axis=1)
            following = windows[window, start + 1 : rows.stop + 1]
            at = np.arange(len(following))
            for index, table in enumerate((log_p, log_q)):
                losses[index, window, start : start + len(following)] = -table[at, following]
    return Divergence(kl, same, losses[0], losses[1])


def bootstrap_interval(values: NDArray[np.float64], *, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bounds of the mean of ``values`` [windows, tokens]: blocks of neighbours are drawn with replacement."""
    parts = [row[start : start + BLOCK_TOKENS] for row in values for start in range(0, len(row), BLOCK_TOKENS)]
    sums, sizes = np.array([part.sum() for part in parts]), np.array([part.size for part in parts])
    draws = np.random.default_rng(seed).integers(0, len(parts), (NUM_RESAMPLES, len(parts)))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def summary(divergence: Divergence) -> dict[str, Any]:
    """The figures of one engine."""
    low, high = bootstrap_interval(divergence.kl)
    return {
        "mean_kl": float(divergence.kl.mean()),
        "mean_kl_interval_95": [low, high],
        "kl_percentile_99_9": float(np.quantile(divergence.kl, 0.999)),
        "top1_agreement": float(divergence.same_top.mean()),
        "perplexity": math.exp(float(divergence.loss.mean())),
        "reference_perplexity": math.exp(float(divergence.reference_loss.mean())),
    }


def text_windows(text: str, checkpoint: Any, *, num_tokens: int, window_tokens: int) -> Tokens:
    """Windows [count, tokens] of the text from its beginning, each with the begin token where the model wants one."""
    tokenizer = load_tokenizer(checkpoint)
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    length = window_tokens - len(begin)
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = num_tokens // window_tokens
    if len(ids) < count * length:
        raise SystemExit(f"the text has {len(ids)} tokens where {count * length} are needed: give a longer --text")
    return np.array([begin + ids[index * length : (index + 1) * length] for index in range(count)], np.int32)


def paceline_logits(checkpoint: Checkpoint, args: argparse.Namespace, windows: Tokens) -> tuple[Logits, dict[str, Any]]:
    """Our executor and the path that it runs."""
    rows = min(256, args.window)
    config = EngineConfig(
        weights=args.weights,
        head_bits=args.head_bits,
        kv_dtype=args.kv,
        isa=args.isa,
        num_threads=args.threads,
        max_batch=rows,
        token_budget=rows,
        context_length=args.window,
        kv_memory_bytes=pages_for(args.window) * KVLayout.of(checkpoint.config, args.kv).page_bytes,
    ).resolve(detect_machine(args.isa))
    executor: Executor
    if args.executor == "native":
        from paceline.executors.native import NativeExecutor

        executor = NativeExecutor.load(checkpoint, config)
    else:
        from paceline.executors.reference import ReferenceExecutor

        executor = ReferenceExecutor.load(checkpoint, config, num_pages=pages_for(args.window))
    return executor_logits(executor, windows), {
        **executor.path(),
        "head": config.weights_of("output.weight", tied_embeddings=True),
    }


def llama_cpp_logits(path: Path, windows: Tokens, num_threads: int | None) -> tuple[Logits, dict[str, Any]]:
    """llama.cpp on the same file, with its own defaults."""
    import llama_cpp

    length = windows.shape[1]
    threads = num_threads or detect_machine().num_threads
    model = llama_cpp.Llama(
        str(path),
        n_ctx=length,
        n_batch=length,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )

    def logits(window: int) -> Table:
        model.reset()
        model.eval(windows[window].tolist())
        return np.asarray(model.scores[:length], np.float32)

    info = llama_cpp.llama_print_system_info().decode().strip()
    return logits, {"llama_cpp_python": version("llama_cpp_python"), "threads": threads, "system": info}


def table(document: dict[str, Any]) -> Iterator[str]:
    """The figures as lines for a person."""
    yield f"{'':<12}{'mean KL':>10}  {'95 % interval':<18}{'99.9 %':>9}{'same top':>10}{'perplexity':>12}"
    for name, row in document["engines"].items():
        low, high = row["mean_kl_interval_95"]
        yield (
            f"{name:<12}{row['mean_kl']:>10.5f}  {f'{low:.5f} to {high:.5f}':<18}{row['kl_percentile_99_9']:>9.4f}"
            f"{row['top1_agreement']:>10.2%}{row['perplexity']:>12.4f}"
        )
        if "kl_above_paceline_interval_95" in row:
            low, high = row["kl_above_paceline_interval_95"]
            yield f"{'':<12}{'above ours':>10}  {f'{low:+.5f} to {high:+.5f}':<18}"
    reference = next(iter(document["engines"].values()))["reference_perplexity"]
    yield f"{'float32':<12}{'':>10}  {'':<18}{'':>9}{'':>10}{reference:>12.4f}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description="KL divergence, agreement and perplexity against float32 arithmetic.")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument(
        "--text", type=Path, default=EXCERPT, metavar="FILE", help="default: the excerpt beside this file"
    )
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="in all (default 2048)")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens read together (default 512)")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="native")
    parser.add_argument("--head-bits", choices=WEIGHT_FORMATS)
    parser.add_argument("--kv", choices=KV_FORMATS, default="f16")
    parser.add_argument("--isa", metavar="NAME")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--executor", choices=("native", "reference"), default="native")
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the JSON document to this file too")
    args = parser.parse_args(arguments)
    if not 2 <= args.window <= args.tokens:
        parser.error(f"--window {args.window} must be between 2 and --tokens {args.tokens}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """The command: a table, then one JSON document as the last line."""
    args = parse(arguments)
    path = resolve_model(args.model)
    checkpoint = open_checkpoint(path)
    model: ModelConfig = checkpoint.config
    if args.window > model.context_length:
        raise SystemExit(f"--window {args.window} is longer than the model's context of {model.context_length}")
    text = args.text.read_text(encoding="utf-8")
    windows = text_windows(text, checkpoint, num_tokens=args.tokens, window_tokens=args.window)
    started_s = time.perf_counter()
    reference = Float32Reference(checkpoint, windows, report)
    reference_s = time.perf_counter() - started_s
    engines: dict[str, Any] = {}
    logits, engine_path = paceline_logits(checkpoint, args, windows)
    ours = diverge(reference.logits, logits, windows)
    engines["paceline"] = {**summary(ours), "path": engine_path}
    if args.no_peers:
        pass
    elif not path.is_file():
        print("llama.cpp is left out: it reads GGUF files only", file=sys.stderr)
    elif find_spec("llama_cpp") is None:
        print("llama.cpp is left out: llama_cpp is not installed (llama-cpp-python on PyPI)", file=sys.stderr)
    else:
        logits, engine_path = llama_cpp_logits(path, windows, args.threads)
        theirs = diverge(reference.logits, logits, windows)
        difference = list(bootstrap_interval(theirs.kl - ours.kl))  # token by token: surer than two means
        engines["llama.cpp"] = {**summary(theirs), "kl_above_paceline_interval_95": difference, "path": engine_path}
    document = {
        "metric": "mean_kl",
        "model": path.name,
        "text": args.text.name,
        "tokens": int(windows.size),
        "window": args.window,
        "reference_s": reference_s,
        "engines": engines,
        "environment": environment(),
    }
    print("\n".join(table(document)))
    line = json.dumps(document, allow_nan=False, ensure_ascii=False)
    if args.output is not None:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
    return 0


def report(done: int, total: int) -> None:
    """A line that counts, on a terminal."""
    if sys.stderr.isatty():
        print(f"\rreference: {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PacelineError as error:
        sys.exit(f"error: {error}")
