"""The chunk beside decodes, on machines that are formulas: a step takes ``base_s`` for each decode and more for each
row of a prompt, the more the deeper it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paceline.engine.pace import FEWEST_ROWS, FIRST_ROWS, ChunkPacer

BUDGET = 256


def no_noise(step: int) -> float:
    return 1.0


def prefill(
    pacer: ChunkPacer,
    *,
    num_tokens: int,
    decode_s: Callable[[int], float],
    row_s: Callable[[int], float],
    num_decodes: Callable[[int], int] = lambda step: 1,
    noise: Callable[[int], float] = no_noise,
) -> Iterator[tuple[int, float]]:
    """(rows, seconds) of each step of a prompt's prefill beside decodes, on a machine where a step with n decodes takes
    ``decode_s(n)`` and a row at depth d ``row_s(d)``."""
    step = depth = 0
    while depth < num_tokens:
        decodes = num_decodes(step)
        rows = min(num_tokens - depth, BUDGET if pacer.max_rows is None else min(BUDGET, pacer.max_rows))
        elapsed_s = (decode_s(decodes) + rows * row_s(depth)) * noise(step)
        pacer.observe(decodes + 1, decodes + rows, elapsed_s)
        yield rows, elapsed_s
        step, depth = step + 1, depth + rows


def decoding(pacer: ChunkPacer, num_decodes: int, elapsed_s: float, num_steps: int = 20) -> ChunkPacer:
    for _ in range(num_steps):
        pacer.observe(num_decodes, num_decodes, elapsed_s)
    return pacer


def flat(depth: int) -> float:
    return 1.5e-3


def deeper(depth: int) -> float:
    """Five times as expensive after 8,000 tokens."""
    return 1.5e-3 * (1 + 4 * depth / 8000)


def lone(num_decodes: int) -> float:
    return 8e-3


def test_without_a_bound_there_is_no_limit() -> None:
    pacer = decoding(ChunkPacer(None), 1, 5.0)
    pacer.observe(2, 257, 9.0)
    assert pacer.max_rows is None


def test_first_chunk_is_small_since_nothing_is_known() -> None:
    assert ChunkPacer(100.0).max_rows == FIRST_ROWS
    assert decoding(ChunkPacer(100.0), 1, 8e-3).max_rows == FIRST_ROWS


def test_speed_of_a_prompt_alone_serves_when_an_answer_begins() -> None:
    pacer = ChunkPacer(100.0)
    pacer.observe(1, 200, 200 * 1e-3)
    assert pacer.max_rows == 60


@pytest.mark.parametrize("max_gap_ms", [50.0, 100.0, 400.0])
def test_every_step_stays_under_the_bound_while_rows_grow_expensive(max_gap_ms: float) -> None:
    pacer = decoding(ChunkPacer(max_gap_ms), 1, 8e-3)
    steps = list(prefill(pacer, num_tokens=8000, decode_s=lone, row_s=deeper))
    assert steps[0][0] == FIRST_ROWS
    assert max(elapsed_s for _, elapsed_s in steps) <= max_gap_ms / 1e3
    # And no step wastes much of it: all but the first and the last fill half of the bound, or the budget.
    assert all(elapsed_s >= 0.5 * max_gap_ms / 1e3 or rows == BUDGET for rows, elapsed_s in steps[1:-1])


def test_spikes_of_neighbours_do_not_last() -> None:
    def noise(step: int) -> float:
        return 6.0 if step % 40 == 20 else 1.0

    pacer = decoding(ChunkPacer(100.0), 1, 8e-3)
    steps = list(prefill(pacer, num_tokens=8000, decode_s=lone, row_s=flat, noise=noise))
    calm = [elapsed_s for step, (_, elapsed_s) in enumerate(steps) if noise(step) == 1.0]
    assert max(calm) <= 0.1
    before, after = steps[20][0], [rows for rows, _ in steps[21:40]]
    assert after[0] <= before / 5, "what was slow once may be slow again"
    assert after[-1] >= 0.9 * before


@pytest.mark.parametrize("counts", [(1, 24), (24, 1), (1, 24, 1, 24)])
def test_batches_that_grow_or_shrink_beside_the_prompt(counts: tuple[int, ...]) -> None:
    def decode_s(num_decodes: int) -> float:
        return 7e-3 + 1e-3 * num_decodes

    def num_decodes(step: int) -> int:
        return counts[min(step // 30, len(counts) - 1)]

    pacer = decoding(ChunkPacer(100.0), counts[0], decode_s(counts[0]))
    steps = list(prefill(pacer, num_tokens=8000, decode_s=decode_s, row_s=flat, num_decodes=num_decodes))
    assert len(steps) > 30 * len(counts)
    assert max(elapsed_s for _, elapsed_s in steps) <= 0.1
    assert min(elapsed_s for _, elapsed_s in steps[-30:-1]) >= 0.04


def test_a_new_prompt_after_a_deep_one_speeds_up_again() -> None:
    pacer = decoding(ChunkPacer(100.0), 1, 8e-3)
    first = list(prefill(pacer, num_tokens=8000, decode_s=lone, row_s=deeper))
    second = list(prefill(pacer, num_tokens=8000, decode_s=lone, row_s=deeper))
    assert second[0][0] == first[-2][0]
    assert max(rows for rows, _ in second) >= 0.8 * max(rows for rows, _ in first)
    assert len(second) <= 1.1 * len(first)


def test_a_machine_that_is_too_slow_for_the_bound_still_goes_on() -> None:
    pacer = decoding(ChunkPacer(100.0), 1, 0.3)
    steps = list(prefill(pacer, num_tokens=100, decode_s=lambda num: 0.3, row_s=flat))
    assert sum(rows for rows, _ in steps) == 100
    # The answers alone break the bound: prompts take half of their time again.
    assert all(rows >= FEWEST_ROWS and elapsed_s <= 0.46 for rows, elapsed_s in steps)
    assert max(rows for rows, _ in steps) > FEWEST_ROWS


def test_few_rows_beside_decodes_say_nothing() -> None:
    pacer = decoding(ChunkPacer(100.0), 1, 8e-3)
    pacer.observe(2, 2 + FEWEST_ROWS - 2, 3.0)
    assert pacer.max_rows == FIRST_ROWS
    assert pacer.row_s is None
