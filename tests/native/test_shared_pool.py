"""Two programs over one KV pool: the same model in two weight formats, each continuing on what the other computed."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_step

from paceline import _native
from paceline.config import KV_FORMATS, KVFormat, RopeConfig
from paceline.errors import UnsupportedError
from paceline.executors.native import NativeExecutor

CHECKPOINT = tiny_checkpoint(tiny_config())
NUM_PAGES = 12
LENGTH, PREFIX = 150, 140


def load(weights: str = "native", pages_of: NativeExecutor | None = None, **config: Any) -> NativeExecutor:
    engine = engine_config(CHECKPOINT.config, num_pages=NUM_PAGES, rows=160, weights=weights, **config)
    return NativeExecutor.load(CHECKPOINT, engine, pages_of)


(SEQUENCE,) = random_sequences([LENGTH], CHECKPOINT.config.vocab_size)
PREFIX_ROWS, REST = SEQUENCE.part(0, PREFIX), SEQUENCE.part(PREFIX, LENGTH)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_the_second_reads_what_the_first_wrote(kv_dtype: KVFormat, isa: str) -> None:
    first = load(kv_dtype=kv_dtype, isa=isa)
    second = load("int4", first, kv_dtype=kv_dtype, isa=isa, num_threads=2)
    run_step(first, [PREFIX_ROWS])
    apart = load("int4", kv_dtype=kv_dtype, isa=isa)
    (over_nothing,), _ = run_step(apart, [REST])
    apart.pages[:] = first.pages
    (expected,), _ = run_step(apart, [REST])
    (found,), _ = run_step(second, [REST])
    assert found.tobytes() == expected.tobytes()
    assert not np.array_equal(found, over_nothing)
    assert np.array_equal(first.pages, apart.pages)  # what the second wrote is in the pool of the first
    assert np.array_equal(second.pages, first.pages)


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_rows_that_the_first_computes_again_are_its_own(kv_dtype: KVFormat) -> None:
    """Nothing of a draft is left where the first has computed the same positions."""
    alone = load(kv_dtype=kv_dtype)
    run_step(alone, [PREFIX_ROWS])
    (expected,), _ = run_step(alone, [REST])
    first = load(kv_dtype=kv_dtype)
    second = load("int4", first, kv_dtype=kv_dtype)
    run_step(first, [PREFIX_ROWS])
    run_step(second, [REST])
    assert not np.array_equal(first.pages, alone.pages)
    (found,), _ = run_step(first, [REST])
    assert found.tobytes() == expected.tobytes()
    assert np.array_equal(first.pages, alone.pages)


def test_a_pool_outlives_its_owner() -> None:
    first = load()
    run_step(first, [PREFIX_ROWS])
    second = load("int4", first)
    expected = run_step(second, [REST])[0][0]
    del first
    gc.collect()
    assert run_step(second, [REST])[0][0].tobytes() == expected.tobytes()
    third = load("int4", second)
    del second
    gc.collect()
    assert run_step(third, [REST])[0][0].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 1}, "layers 1 and 2"),
        ({"num_heads": 4, "num_kv_heads": 4}, "KV heads 4 and 2"),
        ({"head_dim": 32}, "head_dim 32 and 16"),
        ({"rope": RopeConfig(5000.0, 16)}, "rope"),
        ({"kv_dtype": "f32"}, "kv_dtype f32 and f16"),
        ({"num_pages": 11}, "pages 11 and 12"),
        ({"num_layers": 1, "kv_dtype": "int8"}, "layers 1 and 2, kv_dtype int8 and f16"),
    ],
)
def test_pages_of_another_shape_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    first = load()
    model = {name: changes.pop(name) for name in list(changes) if name not in ("kv_dtype", "num_pages")}
    checkpoint = tiny_checkpoint(replace(CHECKPOINT.config, **model))
    engine = engine_config(checkpoint.config, rows=160, **({"num_pages": NUM_PAGES} | changes))
    with pytest.raises(UnsupportedError, match=named):
        NativeExecutor.load(checkpoint, engine, first)


def test_the_program_refuses_too() -> None:
    """Below the executor, so that no pointer ever reaches past a pool."""

    def program(pages_of: _native.Program | None = None, *, num_pages: int = 3, layers: int = 2) -> _native.Program:
        return _native.Program("scalar", 1, 4, 4, 8, num_pages, 64, 2, 2, 16, layers, "f16", pages_of=pages_of)

    first = program()
    assert np.shares_memory(program(first).kv(), first.kv())
    for wrong in ({"num_pages": 2}, {"layers": 1}):
        with pytest.raises(ValueError, match="pages_of"):
            program(first, **wrong)
