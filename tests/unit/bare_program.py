"""Native programs without a model, for single records."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from token_sequences import random_sequences, step_plan

from paceline import _native
from paceline.executors.native import NativeExecutor


def new_program(isa: str, rows: int, num_threads: int) -> _native.Program:
    """Without a model: one head of 16 components, a page, a vocabulary of 1."""
    return _native.Program(isa, num_threads, rows, 1, 1, -(-rows // 32), rows, 1, 1, 16, 1, "f32")


def begin_step(program: _native.Program, rows: int) -> None:
    """A step of so many rows; its records run only when they are asked for."""
    plan = step_plan([random_sequences([rows], 1)[0].part(0, rows)], outputs=[])
    executor = SimpleNamespace(program=program, _set_features=lambda plan: None)
    NativeExecutor.set_step(executor, plan, np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))  # type: ignore[arg-type]
    program.begin_step()
