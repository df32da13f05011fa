"""Throughput of the torch executor on a GPU, beside Transformers, vLLM and what the device allows.

    python benchmarks/gpu.py                                    # 1B and 8B Llama shapes, bf16 and int4, on cuda
    python benchmarks/gpu.py --device cpu --shape tiny          # tries the program out; such figures mean nothing

Weights are random and made on the device: no model is downloaded and no file of weights written. Workloads, all greedy:

    decode   one sequence after ``--depth`` tokens, ``--new`` more: new tokens over their time
    batch    ``--batch`` sequences likewise, together
    prefill  ``--prompt`` tokens at once: tokens over the time to the first new one

One run warms up (kernels are compiled, graphs recorded), ``--runs`` count; the table has medians. Limits come from the
same run: bytes that a step must read (matrices once, keys and values of each sequence) over the measured bandwidth of
reading, for prefill two operations a weight over the measured speed of a large product in bf16 (f32 on a CPU).

The last line is one JSON document:

    {"benchmark": "gpu",
     "environment": {...}, "device": {"type", "name", "memory_bytes"}, "versions": {"torch", "transformers", ...},
     "arguments": {"depth", "new", "batch", "prompt", "runs"},
     "peaks": {"read_bytes_per_s", "copy_bytes_per_s", "operations_per_s"},
     "results": [{"shape", "weights", "engine", "workload", "tokens_per_s": median, "runs": [...], "limit_tokens_per_s",
                  "fraction": of the limit, "weight_bytes": that a step reads, "path": {...}}, ...],
     "left_out": [{"shape", "weights", "engine", "reason"}, ...]}
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import gpu_engines
import torch
from gpu_engines import ENGINES, Job, LeftOutError
from synthetic import SHAPES, Dimensions

from paceline.config import ModelConfig
from paceline.measure.record import environment

WEIGHTS = ("bf16", "int4")
WORKLOADS = ("decode", "batch", "prefill")


@dataclass(frozen=True)
class Peaks:
    """What the device reached: bytes read, bytes read and written by a copy, and operations of a large product, each in
    a second."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    operations_per_s: float


def measure_peaks(device: torch.device, *, num_bytes: int, size: int) -> Peaks:
    """With arrays of ``num_bytes`` and a product of matrices [size, size]; the best of several times each."""
    x = torch.ones(num_bytes // 4, device=device)
    y = torch.empty_like(x)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones((size, size), dtype=kind, device=device)
    read_s = best_s(lambda: x.sum(), device)
    copy_s = best_s(lambda: y.copy_(x), device)
    product_s = best_s(lambda: a @ a, device)
    return Peaks(num_bytes / read_s, 2 * num_bytes / copy_s, 2 * size**3 / product_s)


def best_s(work: Any, device: torch.device, *, times: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        gpu_engines.synchronize(device)
        start = time.perf_counter()
        work()
        gpu_engines.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def limit_tokens_per_s(peaks: Peaks, config: ModelConfig, workload: str, job: Job, weight_bytes: int) -> float:
    """What the device allows; ``weight_bytes`` are those that a step reads."""
    if workload == "prefill":
        head = config.vocab_size * config.hidden_size
        return peaks.operations_per_s / (2 * (gpu_engines.num_weights(config) - head))
    rows = job.batch if workload == "batch" else 1
    kv_bytes = 2 * 2 * config.num_layers * config.kv_size * (job.depth + job.new / 2)
    return rows * peaks.read_bytes_per_s / (weight_bytes + rows * kv_bytes)


def measure(shape: str, weights: str, name: str, job: Job, device: torch.device, runs: int) -> tuple[Any, list[Any]]:
    """What the engine is, and of each run the tokens a second of each workload."""
    engine = ENGINES[name](SHAPES[shape], weights, job, device)
    try:
        found = []
        for run in range(runs + 1):
            rates = {workload: getattr(engine, workload)(run) for workload in WORKLOADS}
            if run:
                found.append(rates)
        return (engine.path, engine.weight_bytes), found
    finally:
        engine.close()


def results_of(
    shape: str, weights: str, name: str, job: Job, device: torch.device, runs: int, peaks: Peaks
) -> list[dict[str, Any]]:
    """Of one engine, a line for each workload."""
    (path, weight_bytes), found = measure(shape, weights, name, job, device, runs)
    results = []
    for workload in WORKLOADS:
        rates = [run[workload] for run in found]
        limit = limit_tokens_per_s(peaks, SHAPES[shape].config(), workload, job, weight_bytes)
        median = statistics.median(rates)
        results.append(
            {
                "shape": shape,
                "weights": weights,
                "engine": name,
                "workload": workload,
                "tokens_per_s": median,
                "runs": rates,
                "limit_tokens_per_s": limit,
                "fraction": median / limit,
                "weight_bytes": weight_bytes,
                "path": path,
            }
        )
    return results


def table(results: list[dict[str, Any]]) -> str:
    """For people."""
    head = f"{'shape':6} {'weights':7} {'engine':13} {'workload':9} {'tok/s':>10} {'limit':>10} {'share':>6}"
    lines = [
        f"{r['shape']:6} {r['weights']:7} {r['engine']:13} {r['workload']:9} {r['tokens_per_s']:10.1f} "
        f"{r['limit_tokens_per_s']:10.1f} {r['fraction']:6.2f}"
        for r in results
    ]
    return "\n".join([head, *lines])


def versions() -> dict[str, str]:
    """Of what may have run."""
    found = {}
    for name in ("torch", "triton", "transformers", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(device: torch.device) -> dict[str, Any]:
    """The device by name and memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    return {"type": "cpu", "name": environment()["processor"], "memory_bytes": gpu_engines.free_bytes(device)}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Numbers are small by default on a CPU."""
    parser = argparse.ArgumentParser(
        description="Throughput on a GPU beside Transformers, vLLM and the device's limits."
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["1b", "8b"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--depth", type=int, help="tokens before decoding (default 512; 32 on a CPU)")
    parser.add_argument("--new", type=int, help="tokens decoded (default 128; 8 on a CPU)")
    parser.add_argument("--batch", type=int, help="sequences of batch (default 32; 4 on a CPU)")
    parser.add_argument("--prompt", type=int, help="tokens of prefill (default 2048; 64 on a CPU)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", help="a file to which the document is appended")
    args = parser.parse_args(arguments)
    on_cpu = args.device == "cpu"
    for name, large, small in (("depth", 512, 32), ("new", 128, 8), ("batch", 32, 4), ("prompt", 2048, 64)):
        if getattr(args, name) is None:
            setattr(args, name, small if on_cpu else large)
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive")
    if args.new < 2 or args.runs < 1:
        parser.error("--new must be at least 2 and --runs at least 1")
    return args


def fits_context(dimensions: Dimensions, job: Job) -> str | None:
    """Why not, or None."""
    longest = max(job.depth + job.new, job.prompt + 1)
    if longest <= dimensions.context_length:
        return None
    return f"{longest} tokens are more than its context of {dimensions.context_length}"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    args = parse(arguments)
    device = torch.device(args.device)
    on_cpu = device.type == "cpu"
    job = Job(args.depth, args.new, args.batch, args.prompt)
    peaks = measure_peaks(device, num_bytes=1 << (27 if on_cpu else 32), size=1024 if on_cpu else 8192)
    results: list[dict[str, Any]] = []
    left_out = []
    for shape in args.shape:
        for weights in args.weights:
            for name in args.engines:
                print(f"{shape} {weights} {name} ...", file=sys.stderr, flush=True)
                try:
                    if reason := fits_context(SHAPES[shape], job):
                        raise LeftOutError(reason)
                    results += results_of(shape, weights, name, job, device, args.runs, peaks)
                except LeftOutError as error:
                    left_out.append({"shape": shape, "weights": weights, "engine": name, "reason": str(error)})
    print(table(results))
    for entry in left_out:
        print(f"left out: {entry['shape']} {entry['weights']} {entry['engine']}: {entry['reason']}")
    document = {
        "benchmark": "gpu",
        "environment": environment(),
        "device": describe(device),
        "versions": versions(),
        "arguments": {name: getattr(args, name) for name in ("depth", "new", "batch", "prompt", "runs")},
        "peaks": vars(peaks),
        "results": results,
        "left_out": left_out,
    }
    line = json.dumps(document, allow_nan=False)
    print(line)
    if args.output:
        with open(args.output, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
