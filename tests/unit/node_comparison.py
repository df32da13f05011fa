"""A model on the native executor and on the reference, node by node, over steps that meet every way in which attention
is cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiny_models import MemoryCheckpoint
from token_sequences import engine_config, random_sequences, step_plan

from paceline.config import ModelConfig
from paceline.executors.base import StepPlan
from paceline.executors.compare import Difference, compare_step
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor

NUM_PAGES = 16


def steps(model: ModelConfig) -> list[tuple[StepPlan, bool]]:
    """Steps, and whether to compare them: a prompt, then a second one that joins, and decodes across 128 and 256 keys.

    Those are where attention takes another split. Few rows together read the splits of a long context apart and merge
    them; many rows read them in turn. The steps between only fill the pages.
    """
    a, b = random_sequences([275, 40], model.vocab_size)
    return [
        (step_plan([a.part(0, 37)]), True),
        (step_plan([a.part(37, 119)]), False),
        (step_plan([a.part(119, 130), b.part(0, 3)], outputs=[0, 9, 13]), True),
        (step_plan([b.part(3, 4), a.part(130, 131)]), True),
        (step_plan([a.part(131, 250), b.part(4, 31)]), False),
        (step_plan([a.part(250, 254), b.part(31, 34)]), True),
        (step_plan([a.part(254, 270)]), True),
        (step_plan([a.part(270, 271)]), True),
    ]


def executors(
    native: MemoryCheckpoint, reference: MemoryCheckpoint, **config: Any
) -> tuple[NativeExecutor, ReferenceExecutor]:
    """Both executors, of checkpoints that are the same unless a test wants to see a difference."""
    engine = engine_config(native.config, num_pages=NUM_PAGES, rows=160, **config)
    plain = ReferenceExecutor.load(reference, replace(engine, isa=None), num_pages=NUM_PAGES)
    return NativeExecutor.load(native, engine), plain


def assert_agrees(checkpoint: MemoryCheckpoint, **config: Any) -> None:
    native, reference = executors(checkpoint, checkpoint, **config)
    for plan, compared in steps(checkpoint.config):
        if not compared:
            native.run(plan)
            continue
        differences = compare_step(native, reference, plan)
        wrong = [difference for difference in differences if not difference.bound_ratio <= 1]
        assert not wrong
        assert len(differences) > 8 * checkpoint.config.num_layers


def wrong_values(native: NativeExecutor, reference: ReferenceExecutor, plans: list[StepPlan]) -> set[str]:
    """Names of the values that some step gets wrong."""
    found: list[Difference] = []
    for plan in plans:
        found += compare_step(native, reference, plan)
    return {difference.value for difference in found if not difference.bound_ratio <= 1}
