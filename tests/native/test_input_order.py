"""Weights whose groups are made of inputs in another order, and those that want one scale a token, in whole layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import MemoryCheckpoint, as_f32, quantized, tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_chunks, step_plan

from paceline import _native
from paceline.config import ModelConfig
from paceline.executors.compare import compare_step
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.weights.blocks import dequantize

ISAS = _native.isas()
ORDERED = ("Q4G32Z", "Q4_0", "Q4G128Z", "Q8G64", "Q8C")
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SAME_INPUT = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_up": "ffn_gate"}
"""Matrices of a layer that a method gives one order, since they read one input."""


def small_config(**changes: Any) -> ModelConfig:
    return tiny_config(hidden_size=128, intermediate_size=256, num_heads=8, num_layers=1, **changes)


def order_of(seed: int, num_inputs: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(num_inputs).astype(np.int32)


def quantised_checkpoint(
    config: ModelConfig, kinds: dict[str, str], *, apart: tuple[str, ...] = (), ordered: bool = True
) -> MemoryCheckpoint:
    """Each matrix named in ``kinds`` in that kind; with an order of its input, of its own for those in ``apart``."""
    plain = tiny_checkpoint(config)
    tensors = dict(plain.tensors)
    for name, raw in plain.tensors.items():
        module = name.split(".")[-2]
        if module not in kinds or not name.endswith(".weight"):
            continue
        source = module if module in apart else SAME_INPUT.get(module, module)
        seed = ([*kinds].index(source) if source in kinds else 0) + 1
        order = order_of(seed, raw.shape[1]) if ordered else None
        values = as_f32(plain, [name])[name]
        kind = {"Q4_0": "Q4G32", "Q8_0": "Q8G32"}.get(kinds[module], kinds[module])
        tensors[name] = quantized(values, kind, order).blocks(name)
        assert tensors[name].kind == kinds[module]
    return replace(plain, tensors=tensors)


def assert_agrees(checkpoint: MemoryCheckpoint, **config: Any) -> NativeExecutor:
    """Every value of steps of many and of one row is what the ops say, within its bound."""
    engine = engine_config(checkpoint.config, num_pages=4, rows=64, **config)
    native = NativeExecutor.load(checkpoint, engine)
    reference = ReferenceExecutor.load(checkpoint, replace(engine, isa=None), num_pages=4)
    (sequence,) = random_sequences([40], checkpoint.config.vocab_size)
    for begin, end in ((0, 37), (37, 38), (38, 40)):
        differences = compare_step(native, reference, step_plan([sequence.part(begin, end)]))
        assert not [difference for difference in differences if not difference.bound_ratio <= 1], (begin, end)
    return native


def records(executor: NativeExecutor) -> list[str]:
    return [executor.program.record_name(index) for index in range(executor.program.num_records)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ORDERED)
def test_a_layer_in_another_order(isa: str, kind: str) -> None:
    """One quantise record for each input: q, k and v read the same."""
    checkpoint = quantised_checkpoint(small_config(), dict.fromkeys(LAYER, kind))
    executor = assert_agrees(checkpoint, isa=isa, num_threads=2)
    assert records(executor).count("quantise") == 4
    assert records(executor).count("gate_up") == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["native", "f32", "bf16", "int8", "int4"])
def test_orders_of_their_own(isa: str, weights: str) -> None:
    """Of k beside q and v, and of up beside gate: records apart, and none where weights become floats."""
    checkpoint = quantised_checkpoint(small_config(), dict.fromkeys(LAYER, "Q4G64Z"), apart=("attn_k", "ffn_up"))
    executor = assert_agrees(checkpoint, isa=isa, weights=weights)
    floats = weights in ("f32", "bf16")
    assert records(executor).count("quantise") == (0 if floats else 7)
    assert records(executor).count("gate_up") == (1 if floats else 0)


@pytest.mark.parametrize("isa", ISAS)
def test_one_scale_a_token_beside_other_forms(isa: str) -> None:
    kinds = {"attn_q": "Q8C", "attn_k": "Q4G64", "attn_v": "Q8C", "attn_output": "Q4G128", "ffn_up": "Q8C"}
    for ordered in (False, True):
        checkpoint = quantised_checkpoint(small_config(), kinds, apart=LAYER, ordered=ordered)
        assert_agrees(checkpoint, isa=isa, num_threads=3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ORDERED)
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_in_another_order(isa: str, kind: str, tied: bool) -> None:
    """Rows of the embedding come out in the layer's order."""
    checkpoint = quantised_checkpoint(small_config(tie_embeddings=tied), {"token_embd": kind, "output": kind})
    executor = assert_agrees(checkpoint, isa=isa)
    assert executor.lowered.embedding is not None
    assert executor.lowered.embedding.order is not None
    vocab = checkpoint.config.vocab_size
    plan = replace(step_plan([random_sequences([50], vocab)[0].part(0, 50)]), tokens=np.arange(50, dtype=np.int32))
    executor.set_step(plan, np.zeros((50, 0), np.int32), np.zeros((50, 0), np.float32))
    executor.program.begin_step()
    executor.program.run_records(0, executor.lowered.made_by["x"] + 1)
    found = executor.program.buffer(executor.lowered.places["x"].buffer, 50)[:, :128]
    assert np.array_equal(found, dequantize(checkpoint.tensors["token_embd.weight"])[:50])


def test_odd_numbers_of_outputs_in_another_order() -> None:
    """k and v of 24 outputs are matrices of their own that share a record with q."""
    config = tiny_config(hidden_size=128, intermediate_size=96, num_heads=3, num_kv_heads=1, num_layers=1)
    checkpoint = quantised_checkpoint(config, dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_gate"), "Q4G64Z"))
    assert_agrees(checkpoint)


@pytest.mark.parametrize("kind", ORDERED)
def test_the_reference_reads_the_values_of_the_matrix(kind: str) -> None:
    checkpoint = quantised_checkpoint(small_config(), dict.fromkeys(LAYER, kind))
    reference = ReferenceExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=2, rows=8), num_pages=2)
    weights = reference.step_of(step_plan([random_sequences([4], 75)[0].part(0, 4)])).weights
    for name in ("blk.0.attn_k.weight", "blk.0.ffn_down.weight"):
        assert np.array_equal(weights.values(name), dequantize(checkpoint.tensors[name]))


@pytest.mark.parametrize("kind", ["Q4G64Z", "Q8C"])
def test_bits_do_not_depend_on_chunks_threads_or_instruction_set(kind: str) -> None:
    checkpoint = quantised_checkpoint(small_config(), dict.fromkeys(LAYER, kind), apart=("attn_v",))
    (sequence,) = random_sequences([70], checkpoint.config.vocab_size)
    expected = None
    for isa in ISAS:
        for num_threads, chunk in ((1, 64), (2, 1), (3, 7)):
            config = engine_config(checkpoint.config, num_pages=4, rows=64, isa=isa, num_threads=num_threads)
            logits = run_chunks(NativeExecutor.load(checkpoint, config), sequence, chunk).view(np.uint32)
            expected = logits if expected is None else expected
            assert np.array_equal(logits, expected), (isa, num_threads, chunk)


def test_a_wrong_order_is_seen() -> None:
    """The comparison is not blind: the same codes with two inputs exchanged are another layer."""
    checkpoint = quantised_checkpoint(small_config(), dict.fromkeys(LAYER, "Q4G64Z"))
    name = "blk.0.attn_output.weight"
    raw = checkpoint.tensors[name]
    assert raw.order is not None
    order = raw.order.copy()
    order[[0, 127]] = order[[127, 0]]
    other = replace(checkpoint, tensors=checkpoint.tensors | {name: replace(raw, order=order)})
    engine = engine_config(checkpoint.config, num_pages=4, rows=64)
    native = NativeExecutor.load(other, engine)
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=4)
    differences = compare_step(native, reference, step_plan([random_sequences([9], 75)[0].part(0, 9)]))
    wrong = [difference.value for difference in differences if not difference.bound_ratio <= 1]
    assert wrong == ["blk.0.attn_output.weight.residual"]
