"""The bits of a request's logits in each family's own arrangement of norms, windows, rotations, caps, sinks, experts:
the same in any chunks, on any threads, beside others and on every instruction set.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_chunks, run_step

from paceline import _native
from paceline.config import Experts, RopeConfig
from paceline.executors.native import NativeExecutor

LENGTH, WINDOW = 200, 40  # two splits of 128 keys; windows end in either
LOCAL: dict[str, Any] = {"sliding_window": WINDOW, "windowed_layers": (True, False)}
CONFIGS = {
    "gemma2": tiny_config(
        architecture="gemma2", activation="gelu_tanh", attention_softcap=5.0, logit_softcap=3.0, **LOCAL
    ),
    "gemma3": tiny_config(
        architecture="gemma3", activation="gelu_tanh", qk_norm=True, local_rope=RopeConfig(100.0, 16), **LOCAL
    ),
    "phi3": tiny_config(architecture="phi3", rope=RopeConfig(500.0, 12), sliding_window=WINDOW),
    "granite": tiny_config(architecture="granite", residual_scale=0.2, logit_scale=0.25, embedding_scale=3.0),
    "olmo2": tiny_config(architecture="olmo2", local_rope=RopeConfig(100.0, 16), **LOCAL),
    "smollm3": tiny_config(architecture="smollm3", unrotated_layers=(1,)),
    "exaone4": tiny_config(architecture="exaone4", qk_norm=True, unrotated_layers=(1,), **LOCAL),
    "mixtral": tiny_config(architecture="mixtral", experts=Experts(6, 3, 64)),
    "qwen3moe": tiny_config(
        architecture="qwen3moe", qk_norm=True, experts=Experts(6, 3, 64, normalise=False, dense_layers=(0,))
    ),
    "gpt-oss": tiny_config(
        architecture="gpt-oss",
        activation="swiglu_oai",
        experts=Experts(6, 3, 64, biases=True),
        attention_sinks=True,
        attention_bias=True,
        output_bias=True,
        **LOCAL,
    ),
}


def load(name: str, isa: str, num_threads: int) -> NativeExecutor:
    checkpoint = tiny_checkpoint(CONFIGS[name], "Q4_1", kinds={"ffn_gate_inp.weight": "F32"})
    config = engine_config(CONFIGS[name], num_pages=32, isa=isa, num_threads=num_threads)
    return NativeExecutor.load(checkpoint, config)


@lru_cache
def expected(name: str) -> NDArray[np.float32]:
    """Logits [LENGTH, vocab] of the request alone, whole, on one thread of the plainest instruction set."""
    request = random_sequences([LENGTH], CONFIGS[name].vocab_size)[0]
    logits = run_chunks(load(name, "scalar", 1), request, LENGTH)
    assert np.isfinite(logits).all()
    assert np.abs(np.diff(logits, axis=0)).max(axis=1).min() > 0
    return logits


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_threads_and_instruction_sets(name: str, isa: str) -> None:
    request = random_sequences([LENGTH], CONFIGS[name].vocab_size)[0]
    for threads, chunk in ((1, 37), (2, LENGTH), (3, 5)):
        assert run_chunks(load(name, isa, threads), request, chunk).tobytes() == expected(name).tobytes(), chunk
    executor = load(name, isa, 2)
    run_step(executor, [request.part(0, 150)])
    for position in range(150, 160):  # rows of a plain decoding step
        (logits,), _ = run_step(executor, [request.part(position, position + 1)])
        assert logits.tobytes() == expected(name)[position : position + 1].tobytes(), position


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("name", CONFIGS)
def test_others_in_the_batch_change_nothing(name: str, isa: str) -> None:
    """One row of the request beside rows of others that are decoded or read their prompts."""
    first, *others = random_sequences([LENGTH, 60, 33, 90], CONFIGS[name].vocab_size)
    executor = load(name, isa, 2)
    run_step(executor, [first.part(0, 150)])
    run_step(executor, [other.part(0, 20) for other in others])
    for position in range(150, 154):
        at = 20 + position - 150
        beside = [others[0].part(at, at + 1), others[1].part(at, at + 1)]
        (_, _, logits), _ = run_step(executor, [*beside, first.part(position, position + 1)])
        assert logits.tobytes() == expected(name)[position : position + 1].tobytes(), position
    (_, logits), _ = run_step(executor, [others[2].part(20, 90), first.part(154, LENGTH)])
    assert logits.tobytes() == expected(name)[154:].tobytes()
