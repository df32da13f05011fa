"""A model with mixtures of experts: the native executor against the reference, node by node, and the bits of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expert_models import expert_config
from numpy.typing import NDArray
from tiny_models import MemoryCheckpoint, changed, tiny_checkpoint
from token_sequences import engine_config, random_sequences, run_chunks, run_step, step_plan

from paceline import _native
from paceline.config import Experts
from paceline.engine.memory import weight_bytes
from paceline.errors import UnsupportedError
from paceline.executors.compare import compare_step
from paceline.executors.native import NativeExecutor
from paceline.executors.reference import ReferenceExecutor
from paceline.executors.weights import WeightLoader
from paceline.measure.roofline import model_traffic
from paceline.models.registry import build_graph

ISAS = _native.isas()
NUM_PAGES = 8


def load(checkpoint: MemoryCheckpoint, **config: Any) -> NativeExecutor:
    return NativeExecutor.load(checkpoint, engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=160, **config))


def wrong_values(native: MemoryCheckpoint, reference: MemoryCheckpoint, **config: Any) -> set[str]:
    """Names of the values that some step gets wrong: a prompt, two sequences together, single tokens."""
    executor = load(native, **config)
    plain_config = replace(engine_config(native.config, num_pages=NUM_PAGES, rows=160, **config), isa=None)
    plain = ReferenceExecutor.load(reference, plain_config, num_pages=NUM_PAGES)
    a, b = random_sequences([150, 40], native.config.vocab_size)
    plans = [
        step_plan([a.part(0, 130)]),
        step_plan([a.part(130, 139), b.part(0, 3)], outputs=[0, 9]),
        step_plan([b.part(3, 4), a.part(139, 140)]),
        step_plan([a.part(140, 141)]),
    ]
    differences = [difference for plan in plans for difference in compare_step(executor, plain, plan)]
    assert {"route", "experts_glu"} <= {difference.op for difference in differences}
    return {difference.value for difference in differences if not difference.bound_ratio <= 1}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_1", "Q4G64Z", "Q8G64", "Q8C", "MXFP4"])
def test_every_kind_as_the_file_holds_it(isa: str, kind: str) -> None:
    checkpoint = tiny_checkpoint(expert_config(), kind)
    assert wrong_values(checkpoint, checkpoint, isa=isa, num_threads=2) == set()


FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3moe": {"experts": Experts(6, 3, 64, normalise=False, dense_layers=(1,)), "num_layers": 3},
    "gpt-oss": {
        "experts": Experts(6, 3, 64, biases=True),
        "activation": "swiglu_oai",
        "attention_bias": True,
        "output_bias": True,
        "attention_sinks": True,
        "sliding_window": 20,
        "windowed_layers": (True, False),
    },
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_families(isa: str, architecture: str) -> None:
    config = replace(expert_config(**FAMILIES[architecture]), architecture=architecture)
    checkpoint = tiny_checkpoint(config, "Q4_0", kinds={"exps.weight": "MXFP4", "gate_inp.weight": "F32"})
    assert wrong_values(checkpoint, checkpoint, isa=isa, num_threads=2) == set()


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_formats_chosen_on_load(weights: str) -> None:
    checkpoint = tiny_checkpoint(expert_config(), "F32")
    assert wrong_values(checkpoint, checkpoint, weights=weights) == set()
    config = engine_config(checkpoint.config, num_pages=1, weights=weights)
    loader = WeightLoader(checkpoint, build_graph(checkpoint.config), config, num_threads=1)
    (router,) = loader.matrices(["blk.0.ffn_gate_inp.weight"])
    (experts,) = loader.matrices(["blk.0.ffn_down_exps.weight"])
    assert (router.format.kind, experts.num_outputs) == ("f32", 6 * 64)
    assert experts.format.kind == {"bf16": "bf16", "int8": "i8", "int4": "u4"}[weights]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "experts",
    [
        Experts(6, 3, 64, normalise=False),
        Experts(6, 3, 48, biases=True),
        Experts(40, 1, 32),
        Experts(3, 3, 16, biases=True),
    ],
    ids=str,
)
def test_shapes(isa: str, experts: Experts) -> None:
    for kind in ("F32", "Q4_1") if experts.width % 32 == 0 else ("F32",):
        checkpoint = tiny_checkpoint(expert_config(experts=experts), kind)
        assert wrong_values(checkpoint, checkpoint, isa=isa, num_threads=3) == set()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu_oai"])
def test_activations(isa: str, activation: str) -> None:
    experts = Experts(6, 3, 48, biases=True)
    for kind, width in (("F32", 48), ("Q4_0", 64)):
        config = expert_config(experts=replace(experts, width=width), activation=activation)
        checkpoint = tiny_checkpoint(config, kind)
        assert wrong_values(checkpoint, checkpoint, isa=isa) == set()


@pytest.mark.parametrize(
    "kinds",
    [
        {"ffn_gate_exps.weight": "Q8_0"},
        {"ffn_up_exps.weight": "F32"},
        {"ffn_down_exps.weight": "BF16"},
        {"ffn_gate_exps.weight": "Q8C", "ffn_up_exps.weight": "Q8C"},
        {"ffn_down_exps.weight": "Q8C"},
    ],
    ids=str,
)
def test_tensors_of_one_layer_in_different_kinds(kinds: dict[str, str]) -> None:
    checkpoint = tiny_checkpoint(expert_config(), "Q4_0", kinds=kinds)
    assert wrong_values(checkpoint, checkpoint, num_threads=2) == set()


# ---- the comparison must see what is wrong, and where ----

WHERE = {
    "blk.1.ffn_gate_inp.weight": "blk.1.ffn_gate_inp.weight",
    "blk.1.ffn_gate_exps.weight": "blk.1.ffn_gate_exps.weight.glu",
    "blk.1.ffn_up_exps.weight": "blk.1.ffn_gate_exps.weight.glu",
    "blk.1.ffn_down_exps.weight": "blk.1.ffn_down_exps.weight.residual",
    "blk.1.ffn_gate_exps.bias": "blk.1.ffn_gate_exps.weight.glu",
    "blk.1.ffn_up_exps.bias": "blk.1.ffn_gate_exps.weight.glu",
    "blk.1.ffn_down_exps.bias": "blk.1.ffn_down_exps.weight.residual",
}


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
@pytest.mark.parametrize("tensor", WHERE)
def test_one_wrong_byte_is_reported_at_its_node(kind: str, tensor: str) -> None:
    """Of the last expert's last row: one float, which is about 10 then, or the scale of 32 weights, four times as large
    or small.
    """
    checkpoint = tiny_checkpoint(expert_config(experts=Experts(6, 3, 64, biases=True)), kind)
    raw = checkpoint.tensors[tensor]
    at = raw.data.size - (1 if raw.kind == "F32" else 19)
    other = changed(checkpoint, tensor, at, 0x41 if raw.kind == "F32" else raw.data[at] ^ 8)
    assert wrong_values(other, checkpoint) == {WHERE[tensor]}


def test_a_choice_of_other_experts_is_reported_at_the_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint(expert_config(), "Q4_1")
    config = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=160)
    plain = ReferenceExecutor.load(checkpoint, config, num_pages=NUM_PAGES)
    found = set()
    for normalise in (True, False):
        experts = replace(checkpoint.config.experts, normalise=normalise)  # type: ignore[type-var]
        executor = load(replace(checkpoint, config=replace(checkpoint.config, experts=experts)))
        (sequence,) = random_sequences([20], checkpoint.config.vocab_size)
        differences = compare_step(executor, plain, step_plan([sequence.part(0, 20)]))
        found |= {(normalise, one.op) for one in differences if not one.bound_ratio <= 1}
    assert found == {(False, "route")}


# ---- the same bits on every path ----


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kind", "weights"), [("F32", "native"), ("F32", "int4"), ("Q4_1", "native"), ("Q8_0", "native"), ("Q8C", "native")]
)
def test_logits_do_not_depend_on_chunks_threads_or_neighbours(isa: str, kind: str, weights: str) -> None:
    checkpoint = tiny_checkpoint(expert_config(), kind)
    a, b = random_sequences([150, 60], checkpoint.config.vocab_size)
    expected = run_chunks(load(checkpoint, isa="scalar", weights=weights), a, 150)
    assert np.isfinite(expected).all()
    for num_threads in (1, 2, 3):
        executor = load(checkpoint, isa=isa, weights=weights, num_threads=num_threads)
        for chunk in (1, 3, 7, 64, 150):
            assert same_bits(run_chunks(executor, a, chunk), expected), (num_threads, chunk)
    parts = [[b.part(0, 50), a.part(0, 100)], [a.part(100, 101), b.part(50, 60)], [a.part(101, 150)]]
    found = []
    for step in parts:
        logits = run_step(executor, step)[0]
        found += [of_part for part, of_part in zip(step, logits, strict=True) if part.sequence is a]
    assert same_bits(np.concatenate(found), expected)


# ---- what is refused, and what is counted ----


def test_experts_that_are_no_whole_tiles_are_refused() -> None:
    checkpoint = tiny_checkpoint(expert_config(experts=Experts(6, 3, 40)), "F32")
    with pytest.raises(UnsupportedError, match=r"ffn_gate_exps.weight' has 40 outputs for each of 6 experts.*16"):
        load(checkpoint)


def test_more_choices_than_a_row_may_make_are_refused() -> None:
    checkpoint = tiny_checkpoint(expert_config(experts=Experts(40, 33, 16)), "F32")
    with pytest.raises(UnsupportedError, match=r"33 experts for each token.*at most 32"):
        load(checkpoint)


@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
def test_memory_is_that_of_all_experts_and_traffic_that_of_the_chosen(weights: str) -> None:
    experts = Experts(8, 2, 64, biases=True)
    checkpoint = tiny_checkpoint(expert_config(experts=experts, vocab_size=80), "BF16")
    config = engine_config(checkpoint.config, num_pages=1, weights=weights)
    vectors = sum(
        raw.data.size for name, raw in checkpoint.tensors.items() if len(raw.shape) == 1 or name.endswith(".bias")
    )
    assert weight_bytes(checkpoint, config) == load(checkpoint, weights=weights).weight_bytes + vectors
    traffic = model_traffic(checkpoint, config)
    matrices = traffic.layer_bytes + traffic.head_bytes + traffic.expert_bytes
    assert matrices + vectors == weight_bytes(checkpoint, config)
    one, many = (traffic.pass_bytes(0, num_rows=rows) for rows in (1, 1000))
    assert one == pytest.approx(matrices - traffic.expert_bytes * 6 / 8)
    assert many == pytest.approx(matrices)
    assert one < traffic.pass_bytes(0, num_rows=2) < many
