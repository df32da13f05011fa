"""How fast the product of each packed format is: many rows (a prompt) and one (a decode step), on random weights.

Formats take turns, and the fastest of many short runs of each counts, so that other work disturbs little.
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace

import numpy as np

from paceline import _native
from paceline.executors.base import StepPlan
from paceline.executors.native import NativeExecutor
from paceline.sampling.rows import greedy_rows
from paceline.weights.packed import PackedFormat

FORMATS = {
    "Q4_0": PackedFormat("u4", 32),
    "Q4_1": PackedFormat("u4", 32, "min"),
    "Q4G32Z": PackedFormat("u4", 32, "zero"),
    "Q4G64": PackedFormat("u4", 64),
    "Q4G64Z": PackedFormat("u4", 64, "zero"),
    "Q4G128": PackedFormat("u4", 128),
    "Q4G128Z": PackedFormat("u4", 128, "zero"),
    "Q8_0": PackedFormat("i8", 32),
    "Q8G128": PackedFormat("i8", 128),
    "Q8G128Z": PackedFormat("i8", 128, "zero"),
    "Q8C": PackedFormat("i8c", 32),
}


class Product:
    """A program of one quantise record and as many linear ones as matrices, each [num_outputs, num_inputs]."""

    def __init__(
        self, fmt: PackedFormat, num_outputs: int, num_inputs: int, *, rows: int, matrices: int, isa: str, threads: int
    ) -> None:
        program = _native.Program(isa, threads, rows, 1, 1, -(-rows // 32), rows, 1, 1, 16, 1, "f32")
        source, target = program.add_buffer(num_inputs), program.add_buffer(num_outputs)
        activations = program.add_activations(num_inputs)
        rng = np.random.default_rng(0)
        program.quantise(source, num_inputs, activations, fmt.per_token)
        self.matrix_bytes = fmt.matrix_bytes(num_outputs, num_inputs)
        for _ in range(matrices):
            # Bytes below 60 make scales of ordinary size wherever they stand.
            data = rng.integers(0, 60, self.matrix_bytes, np.uint8)
            tile_bytes, groups = fmt.tile_bytes(num_inputs), fmt.num_groups(num_inputs)
            shape = (num_outputs, num_inputs, tile_bytes, groups)
            weight = program.add_matrix(data, fmt.kind, fmt.group, fmt.offset, *shape)
            program.linear([weight], [0], [-1], source, activations, target, False)
        plan = StepPlan(
            tokens=np.zeros(rows, np.int32),
            positions=np.arange(rows, dtype=np.int32),
            row_starts=np.array([0, rows], np.int32),
            page_table=np.arange(-(-rows // 32), dtype=np.int32)[None, :],
            logit_rows=np.zeros(0, np.int32),
            samples=greedy_rows(0),
        )
        executor = SimpleNamespace(program=program, _set_features=lambda plan: None)
        no_tokens, no_logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        NativeExecutor.set_step(executor, plan, no_tokens, no_logprobs)  # type: ignore[arg-type]
        program.begin_step()
        program.buffer(source, rows)[:, :num_inputs] = rng.standard_normal((rows, num_inputs))
        self.program = program
        self.best_s = float("inf")

    def measure(self) -> None:
        """One more run; the fastest is kept."""
        started = time.perf_counter()
        self.program.run_records(1, self.program.num_records)
        self.best_s = min(self.best_s, time.perf_counter() - started)


def main() -> None:
    """Prints a line a format and shape, then one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default=_native.best_isa())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--formats", default=",".join(FORMATS))
    arguments = parser.parse_args()
    results = []
    for num_outputs, num_inputs in ((1536, 512), (512, 1536)):
        for rows, matrices in ((arguments.rows, 1), (1, 24)):
            shape = {"rows": rows, "matrices": matrices, "isa": arguments.isa, "threads": arguments.threads}
            products = {
                name: Product(FORMATS[name], num_outputs, num_inputs, **shape) for name in arguments.formats.split(",")
            }
            for _ in range(arguments.rounds):
                for product in products.values():
                    product.measure()
            for name, product in products.items():
                weights = matrices * num_outputs * num_inputs
                result = {
                    "format": name,
                    "outputs": num_outputs,
                    "inputs": num_inputs,
                    "rows": rows,
                    "gops": 2e-9 * weights * rows / product.best_s,
                    "weight_gb_s": 1e-9 * matrices * product.matrix_bytes / product.best_s,
                    "us_a_matrix": 1e6 * product.best_s / matrices,
                }
                results.append(result)
                print(
                    f"{name:8} [{num_outputs}, {num_inputs}] rows {rows:5}: {result['gops']:7.1f} GOP/s, "
                    f"{result['weight_gb_s']:6.2f} GB/s of weights, {result['us_a_matrix']:9.1f} us a matrix"
                )
    print(json.dumps({"isa": arguments.isa, "threads": arguments.threads, "results": results}))


if __name__ == "__main__":
    main()
