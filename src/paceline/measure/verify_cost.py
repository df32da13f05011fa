"""C(n): what a pass over n new tokens of one sequence costs, all n with logits, relative to a pass over one.

That is the price of verifying n - 1 drafted tokens, so it decides which speculation pays. The executor is driven
directly: the same rows after the same cached tokens, again and again, so nothing but the pass is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.errors import ParameterError
from paceline.executors.base import Executor
from paceline.executors.rows_plan import rows_plan
from paceline.kv.layout import KVLayout, pages_for
from paceline.machine import detect_machine
from paceline.measure.record import Measurement
from paceline.measure.roofline import PeaksProbe, Traffic, decode_work, measure_peaks
from paceline.measure.runs import Report, quiet
from paceline.weights.raw import Checkpoint

MAX_ROWS = 64


def load_executor(checkpoint: Checkpoint, config: EngineConfig, *, depth: int, max_rows: int = MAX_ROWS) -> Executor:
    """The native executor with just the pages that the measurement needs."""
    from paceline.executors.native import NativeExecutor

    config = config.resolve(detect_machine(config.isa))
    num_tokens = depth + max_rows
    most = checkpoint.config.context_length - max_rows
    if depth > most:
        raise ParameterError("depth", depth, f"at most {most}, so that {max_rows} more rows fit the model's context")
    layout = KVLayout.of(checkpoint.config, config.kv_dtype)
    return NativeExecutor.load(
        checkpoint,
        replace(
            config,
            context_length=config.context_length or checkpoint.config.context_length,
            max_batch=max(config.max_batch, max_rows),
            token_budget=max(config.token_budget, config.max_batch, max_rows),
            kv_memory_bytes=pages_for(num_tokens) * layout.page_bytes,
        ),
    )


def measure_verify_cost(
    executor: Executor,
    traffic: Traffic,
    prompt: Sequence[int],
    *,
    depth: int = 64,
    max_rows: int = MAX_ROWS,
    num_runs: int = 15,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """Milliseconds of a pass of 1..``max_rows`` rows after ``depth`` cached tokens of ``prompt``, which holds both.

    The sizes take turns, so a machine that slows down for a moment slows all of them. ``relative`` compares medians.
    """
    assert len(prompt) >= depth + max_rows, (len(prompt), depth)
    chunk = min(executor.max_rows, PAGE_TOKENS * 8)
    for start in range(0, depth, chunk):
        tokens = prompt[start : min(start + chunk, depth)]
        executor.run(rows_plan(tokens, start, num_outputs=1))
    plans = {n: rows_plan(prompt[depth : depth + n], depth, num_outputs=n) for n in range(1, max_rows + 1)}
    times_ms: dict[int, list[float]] = {n: [] for n in plans}
    for index in range(num_runs + 1):
        for n, plan in plans.items():
            started_s = time.perf_counter()
            executor.run(plan)
            elapsed_ms = (time.perf_counter() - started_s) * 1e3
            if index > 0:  # the first round warms up
                times_ms[n].append(elapsed_ms)
        report(index + 1, num_runs + 1)
    step_ms = {n: statistics.median(times) for n, times in times_ms.items()}
    path = {**executor.path(), "speculation": "off"}
    return Measurement(
        metric="verify_cost_1_row_ms",
        runs=tuple(times_ms[1]),
        path=path,
        work=decode_work(traffic, depth=depth, num_new=0),
        peaks=probe(str(path["isa"]), int(path["threads"])),
        achieved_tokens_per_s=1e3 / step_ms[1],
        details={
            "depth": depth,
            "relative": {str(n): step_ms[n] / step_ms[1] for n in step_ms},
            "step_ms": {str(n): step_ms[n] for n in step_ms},
        },
    )
