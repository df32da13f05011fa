"""Recorded decode steps: which steps they are, how rows are filled up, and that answers are the ordinary ones.

A recorder that runs everything anew stands for CUDA's: like a graph it reads and writes only the tensors that it was
recorded with. tests/gpu/test_gpu.py has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import TokenSequence, engine_config, random_sequences, run_step, step_plan
from torch_attention import attend

from paceline.executors.torch.cuda_graphs import DecodeGraphs, Recorded, Recording, Values, bucket_sizes, fits
from paceline.executors.torch.executor import TorchExecutor
from paceline.executors.torch.kernels import Kernels, has_triton_kernels

NUM_PAGES = 12
LENGTHS = [70, 33, 40, 5]


class Recorder:
    """Runs what it recorded anew, into the tensors that the first run made."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, run: Callable[[], Values]) -> Recorded:
        values = run()

        def replay() -> None:
            self.num_replays += 1
            for name, new in run().items():
                values[name].copy_(new)

        return Recorded(replay, values)


def load(recorder: Recorder | None, **changes: Any) -> TorchExecutor:
    checkpoint = tiny_checkpoint(tiny_config(context_length=128, **changes.pop("model", {})))
    config = engine_config(checkpoint.config, num_pages=NUM_PAGES, rows=80, num_threads=1, **changes)
    kernels = Kernels.of_torch(checkpoint.config, torch.device("cpu"))
    if recorder is not None:
        kernels = replace(kernels, recording=Recording(recorder, attend))
    return TorchExecutor.load(checkpoint, config, kernels=kernels)


def fill(executor: TorchExecutor, sequences: list[TokenSequence]) -> None:
    """All tokens of each but the last five, or none where there are no more."""
    for sequence in sequences:
        if len(sequence.tokens) > 5:
            run_step(executor, [sequence.part(0, len(sequence.tokens) - 5)])


def decode(executor: TorchExecutor, sequences: list[TokenSequence], back: int) -> list[np.ndarray[Any, Any]]:
    """Logits of the token that is ``back`` before the end of each, in one step."""
    parts = [sequence.part(len(sequence.tokens) - back, len(sequence.tokens) - back + 1) for sequence in sequences]
    return run_step(executor, parts)[0]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"architecture": "qwen3", "qk_norm": True, "num_kv_heads": 4},
        {"architecture": "qwen2", "attention_bias": True, "sliding_window": 9},
    ],
)
def test_answers_are_the_ordinary_ones(model: dict[str, Any]) -> None:
    """Batches of 1 to 4, in any order of sizes: three of them in a graph of four rows."""
    recorder = Recorder()
    recorded, plain = (load(one, model=model, kv_dtype="f32") for one in (recorder, None))
    sequences = random_sequences(LENGTHS, recorded.model.vocab_size)
    for executor in (recorded, plain):
        fill(executor, sequences)
    assert recorder.num_replays == 0, "prompts go the ordinary way"
    for back, chosen in ((5, [0, 1, 2, 3]), (4, [0, 1, 2]), (3, [3]), (4, [3]), (3, [2, 0]), (3, [1]), (2, [1, 2, 0])):
        logits = [decode(executor, [sequences[index] for index in chosen], back) for executor in (recorded, plain)]
        for found, expected in zip(*logits, strict=True):
            assert np.abs(found - expected).max() < 1e-4 * np.sqrt(np.mean(expected**2))
        assert recorded.hidden().shape == plain.hidden().shape
        assert np.abs(recorded.hidden() - plain.hidden()).max() < 1e-4
    assert recorder.num_replays == 7
    assert recorded.path() == plain.path()


def test_a_graph_is_recorded_once_a_number_of_rows() -> None:
    recorder = Recorder()
    executor = load(recorder)
    sequences = random_sequences(LENGTHS, executor.model.vocab_size)
    fill(executor, sequences)
    for back in (5, 4, 3):
        decode(executor, sequences, back)
        decode(executor, sequences[:3], back)
    assert executor.graphs is not None
    assert executor.graphs.recorded == (4,)
    decode(executor, sequences[:1], 2)
    assert executor.graphs.recorded == (1, 4)


def test_rows_that_fill_up_change_no_page() -> None:
    """Three sequences in a graph of four rows, after a step of four: the fourth's pages stay as they were."""
    executor = load(Recorder(), kv_dtype="f32")
    sequences = random_sequences(LENGTHS, executor.model.vocab_size)
    fill(executor, sequences)
    decode(executor, sequences, 5)
    before = executor.pages.copy()
    decode(executor, sequences[:3], 4)
    written = {int(sequence.pages[(len(sequence.tokens) - 4) // 32]) for sequence in sequences[:3]}
    changed = {page for page in range(NUM_PAGES) if not np.array_equal(before[page], executor.pages[page])}
    assert changed == written


def test_a_graph_over_other_pages_is_seen() -> None:
    """The comparison above can fail."""
    recorder = Recorder()
    recorded, plain = load(recorder, kv_dtype="f32"), load(None, kv_dtype="f32")
    sequences = random_sequences(LENGTHS, recorded.model.vocab_size)
    for executor in (recorded, plain):
        fill(executor, sequences)
    recorded.pages[int(sequences[0].pages[0])] ^= 0x10
    found, expected = (decode(executor, sequences[:1], 5)[0] for executor in (recorded, plain))
    assert np.abs(found - expected).max() > 1e-2


def test_sizes() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100)


def test_where_tritons_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr("paceline.executors.torch.kernels.find_spec", lambda name: object())
    for capability, runs in (((9, 0), True), ((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_triton_kernels(device) is runs
    assert not has_triton_kernels(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("paceline.executors.torch.kernels.find_spec", lambda name: None)
    assert not has_triton_kernels(device)


def test_which_steps_are_recorded() -> None:
    first, second = random_sequences([40, 40], 75)
    plan = step_plan([first.part(30, 31), second.part(9, 10)])
    assert fits(plan, 2)
    assert not fits(plan, 1), "more rows than a graph has"
    assert not fits(step_plan([first.part(30, 32), second.part(9, 10)]), 8), "two rows of a sequence"
    assert not fits(step_plan([first.part(30, 31), second.part(9, 10)], outputs=[1]), 8), "a row without an output"
    assert not fits(replace(plan, kv_writes=np.array([[0, 1]], np.int32)), 8), "a row that is written twice"
    assert not fits(replace(plan, features=np.zeros((2, 4), np.float32)), 8), "features"


def test_more_rows_than_the_largest_graph_go_the_ordinary_way() -> None:
    recorder = Recorder()
    executor = load(recorder, max_batch=2)
    sequences = random_sequences(LENGTHS, executor.model.vocab_size)
    fill(executor, sequences)
    decode(executor, sequences[:3], 5)
    assert recorder.num_replays == 0
    decode(executor, sequences[:2], 4)
    assert recorder.num_replays == 1


def test_scratch_bounds_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split of 128 keys, 4 heads of 16 floats: 256 bytes a row."""
    monkeypatch.setattr("paceline.executors.torch.cuda_graphs.SCRATCH_BYTES", 5 * 256)
    executor = load(Recorder())
    assert executor.graphs is not None
    assert executor.graphs.sizes == (1, 2, 4, 5)


def test_what_cannot_be_recorded() -> None:
    executor = load(Recorder(), kv_dtype="int8")
    assert executor.graphs is None
    assert DecodeGraphs.are_possible(load(None).graph, load(None).pool)
