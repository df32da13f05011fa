"""Requests served by the torch executor get what they would have got alone, whatever the engine does meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_executor import FakeTokenizer
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import EngineConfig
from paceline.engine.outputs import Completion, Timing
from paceline.executors.torch.executor import TorchExecutor
from paceline.kv.layout import KVLayout
from paceline.llm import LLM
from paceline.params import SamplingParams

MODEL = tiny_config()
CHECKPOINT = tiny_checkpoint(MODEL)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Twelve, half of which begin with the same seventy tokens; one repeats itself, so that it can be drafted."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, 74, 70).tolist()
    cases = []
    for at in range(12):
        prompt = (beginning if at % 2 else []) + rng.integers(0, 74, int(rng.integers(3, 50))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(8, 40)),
            temperature=0.8 if at % 3 == 0 else 0.0,
            seed=at,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if at == 5 else None,
        )
        cases.append((prompt, params))
    cases[7] = ([1, 2, 3, 4] * 12, dataclasses.replace(cases[7][1], logit_bias={1: 30.0, 2: 31.0, 3: 30.5}))
    return cases


def serve(*, num_pages: int = 120, **changes: Any) -> tuple[list[Completion], dict[str, int]]:
    config = EngineConfig(
        max_batch=1,
        token_budget=256,
        kv_memory_bytes=num_pages * KVLayout.of(MODEL, "f16").page_bytes,
        num_threads=1,
        prefix_cache=False,
        max_gap_ms=None,
    )
    config = dataclasses.replace(config, **changes)
    executor = TorchExecutor.load(CHECKPOINT, config)
    prompts, params = zip(*requests(), strict=True)
    with LLM.from_parts(executor, FakeTokenizer(MODEL.vocab_size), config=config) as llm:
        completions = llm.generate(list(prompts), list(params))
        stats = llm.stats()
    accepted = sum(done.speculation.accepted for done in completions if done.speculation is not None)
    plain = [
        dataclasses.replace(done, timing=Timing(), num_cached_tokens=0, num_wasted_tokens=0, speculation=None)
        for done in completions
    ]
    return plain, {
        "preemptions": stats.preemptions,
        "cached": sum(done.num_cached_tokens for done in completions),
        "accepted": accepted,
    }


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """One request at a time, each prompt whole."""
    return serve()[0]


@pytest.mark.parametrize(("max_batch", "token_budget"), [(2, 31), (5, 12), (12, 12), (12, 256)])
def test_batches_and_chunks(alone: list[Completion], max_batch: int, token_budget: int) -> None:
    assert serve(max_batch=max_batch, token_budget=token_budget, num_threads=2)[0] == alone


def test_the_prefix_cache(alone: list[Completion]) -> None:
    answers, counts = serve(max_batch=4, token_budget=64, prefix_cache=True)
    assert answers == alone
    assert counts["cached"] > 200


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption(alone: list[Completion], prefix_cache: bool) -> None:
    answers, counts = serve(max_batch=6, token_budget=64, num_pages=5, prefix_cache=prefix_cache)
    assert answers == alone
    assert counts["preemptions"] > 0


@pytest.mark.parametrize("speculate", ["suffix", "ngram"])
def test_drafts(alone: list[Completion], speculate: str) -> None:
    answers, counts = serve(max_batch=4, prefix_cache=True, speculate=speculate, draft_tokens=5)
    assert answers == alone
    assert counts["accepted"] > 0


def test_costs_of_steps_are_measured_for_the_controller(alone: list[Completion]) -> None:
    answers, _ = serve(max_batch=4, prefix_cache=True, speculate="auto")
    assert answers == alone


def test_exact_acceptance_reads_the_distributions() -> None:
    answers, counts = serve(max_batch=4, speculate="ngram", draft_tokens=5, acceptance="exact")
    assert counts["accepted"] > 0
    assert all(done.finish_reason == "length" for done in answers)
