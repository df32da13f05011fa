"""An engine with an EAGLE head: answers are the ones without it, and a head that knows the target is always right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_executor import FakeTokenizer
from numpy.typing import NDArray
from scripted_drafts import TakeAll
from tiny_heads import head_arrays, head_json, write_head
from tiny_models import MemoryCheckpoint, encode, tiny_checkpoint, tiny_config
from token_sequences import engine_config

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.engine.eagle_head import find_eagle_head
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion
from paceline.engine.speculation import use_speculation
from paceline.errors import CheckpointError, ParameterError, UnsupportedError
from paceline.executors.native import NativeExecutor
from paceline.kv.layout import KVLayout
from paceline.params import SamplingParams
from paceline.speculate.eagle import EagleDrafter
from paceline.speculate.speculator import Speculator

VOCAB = HIDDEN = 64
CONTEXT = 200
MEMORY = 2**30
PROMPTS = [[5, 6, 7, 8], [9] * 40, list(range(60)), [1, 2], [50] * 31, [3], [5, 6, 7, 8, 9]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2),
    "to the end of text": SamplingParams(max_tokens=80, logprobs=0),
    "temperature": SamplingParams(max_tokens=30, temperature=0.7, seed=7, ignore_eos=True, logprobs=1),
    "penalties": SamplingParams(max_tokens=30, repetition_penalty=1.4, temperature=0.9, top_p=0.8, ignore_eos=True),
    "prompt_logprobs": SamplingParams(max_tokens=9, prompt_logprobs=1, logprobs=1, ignore_eos=True),
    "one token": SamplingParams(max_tokens=1),
}


@lru_cache
def target() -> MemoryCheckpoint:
    checkpoint = tiny_checkpoint(tiny_config(vocab_size=VOCAB))
    checkpoint.tensors["token_embd.weight"].data.view(np.float32)[:] *= 0.3
    return checkpoint


def make_engine(
    checkpoint: MemoryCheckpoint, directory: Path | None, *, pages: int = 64, limit: int = 5, branches: int = 1
) -> tuple[Engine, TakeAll]:
    """An engine over a target, with a head if there is one, whose drafts are all verified."""
    config = engine_config(checkpoint.config, num_pages=pages, rows=32, max_batch=4, context_length=CONTEXT)
    engine = Engine(NativeExecutor.load(checkpoint, config), FakeTokenizer(VOCAB), config)
    policy = TakeAll(limit)
    if directory is not None:
        head = find_eagle_head(checkpoint, dataclasses.replace(config, speculate=f"eagle:{directory}"), CONTEXT, MEMORY)
        assert head is not None
        drafter = head.open(engine.executor, exact=False)
        drafter._min_confidence, drafter._max_branches = 1e-9, branches
        engine.use_speculator(Speculator([drafter], policy, vocab_size=VOCAB))
    return engine, policy


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
    """The completions, in order."""
    requests = [engine.make_request(prompt, params, seed=11) for prompt in prompts]
    done: dict[int, Completion] = {}
    for request in requests:
        engine.add(request)
    for _ in range(2000):
        if not engine.has_work:
            break
        for update in engine.step():
            if update.completion is not None:
                done[update.request.request_id] = update.completion
        engine.scheduler.check()
    assert engine.stats().pages_used == 0
    speculator = engine._speculator
    if speculator is not None:
        assert speculator.failure is None
        (drafter,) = speculator.drafters
        assert isinstance(drafter, EagleDrafter)
        assert not drafter._held
        assert drafter.kv.num_available == drafter.kv.pool.num_pages
    return [done[request.request_id] for request in requests]


def same(one: Completion, other: Completion) -> bool:
    """Whether two answers are equal in all that does not tell how they were computed."""
    fields = ("text", "token_ids", "finish_reason", "logprobs", "prompt_logprobs")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = head_arrays(target().config, draft_vocab_size=50, norms=True)
    values = head_json(target().config, draft_vocab_size=50, input_norms=True)
    return write_head(tmp_path_factory.mktemp("head"), arrays, values)


@pytest.mark.parametrize("pages", [64, 6])
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_answers_stay_the_same(random_head: Path, name: str, branches: int, pages: int) -> None:
    """Alone and in a batch, with requests that are preempted and prompts that are found in the prefix cache."""
    plain, _ = make_engine(target(), None, pages=pages)
    engine, policy = make_engine(target(), random_head, pages=pages, branches=branches)
    expected = run(plain, PROMPTS, PARAMS[name])
    for one, other in zip(run(engine, PROMPTS, PARAMS[name]), expected, strict=True):
        assert same(one, other)
    for one, other in zip(run(engine, PROMPTS, PARAMS[name]), expected, strict=True):
        assert same(one, other)
    assert (policy.verified > 0) == (name != "one token")
    if pages == 6 and name == "greedy":
        assert engine.stats().preemptions > 0


# A target whose next token is a function of the last one, and heads that know it


def ring(tokens: Sequence[int]) -> dict[int, int]:
    """What follows what."""
    return dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))


CYCLE = np.random.default_rng(3).permutation(VOCAB).tolist()
NEXT = ring(CYCLE)


def successor_matrix() -> NDArray[np.float32]:
    """[vocab, vocab]: takes the unit vector of a token to that of the next."""
    matrix = np.zeros((VOCAB, VOCAB), np.float32)
    for token, following in NEXT.items():
        matrix[following, token] = 1
    return matrix


@lru_cache
def ring_target() -> MemoryCheckpoint:
    """Unit vectors as embeddings, a layer that adds nothing, and a head that looks one ahead."""
    checkpoint = tiny_checkpoint(tiny_config(vocab_size=VOCAB, num_layers=1, tie_embeddings=False))
    values = {
        "token_embd.weight": np.eye(VOCAB),
        "output.weight": successor_matrix() * 3,
        "output_norm.weight": np.ones(HIDDEN),
    }
    for name, raw in checkpoint.tensors.items():
        if "attn_output" in name or "ffn_down" in name:
            values[name] = np.zeros(raw.shape)
    for name, array in values.items():
        data = encode(array.astype(np.float32), "F32", np.random.default_rng(0))
        checkpoint.tensors[name] = dataclasses.replace(checkpoint.tensors[name], data=data)
    return checkpoint


def ring_head(directory: Path, ids: Sequence[int], *, from_features: bool, temptation: float = 0.0) -> Path:
    """A head that adds nothing in its layer and knows the tokens ``ids``.

    It reads only its token's embedding; or only the features, which are those of the token before, so that it must look
    one ahead before its head does, and then leaves what will be the features of the next row. ``temptation`` is how
    strongly it wants to skip a token.
    """
    config = ring_target().config
    arrays: dict[str, NDArray[Any]] = head_arrays(config, draft_vocab_size=len(ids))
    nothing = np.zeros((HIDDEN, HIDDEN), np.float32)
    halves = [nothing, successor_matrix()] if from_features else [np.eye(HIDDEN, dtype=np.float32), nothing]
    arrays |= {
        "fc.weight": np.concatenate(halves, axis=1),
        "layers.0.self_attn.o_proj.weight": np.zeros_like(arrays["layers.0.self_attn.o_proj.weight"]),
        "layers.0.mlp.down_proj.weight": np.zeros_like(arrays["layers.0.mlp.down_proj.weight"]),
        "norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": (3 * successor_matrix() + temptation * successor_matrix() @ successor_matrix())[list(ids)],
        "d2t": np.array(ids) - np.arange(len(ids)),
    }
    return write_head(directory, arrays, head_json(config, draft_vocab_size=len(ids)))


@pytest.mark.parametrize("from_features", [False, True])
def test_a_head_that_knows_the_target_is_always_right(tmp_path: Path, from_features: bool) -> None:
    directory = ring_head(tmp_path, np.random.default_rng(5).permutation(VOCAB).tolist(), from_features=from_features)
    params = SamplingParams(max_tokens=37, ignore_eos=True)
    prompts = [[CYCLE[0]] * 2, [CYCLE[9]] * 40, [7, 7, CYCLE[50]]]
    engine, policy = make_engine(ring_target(), directory)
    for prompt, completion in zip(prompts, run(engine, prompts, params), strict=True):
        at = CYCLE.index(prompt[-1])
        assert list(completion.token_ids) == [CYCLE[(at + 1 + i) % VOCAB] for i in range(37)]
    # The prompt gives the first token; six steps then give six each.
    assert policy.verified == policy.accepted == 3 * 5 * 6
    plain, _ = make_engine(ring_target(), None)
    run(plain, prompts, params)
    assert engine.stats().steps < plain.stats().steps / 4


def test_a_token_that_the_head_lacks_ends_what_is_accepted(tmp_path: Path) -> None:
    lacking = CYCLE[10]
    directory = ring_head(tmp_path, [token for token in range(VOCAB) if token != lacking], from_features=True)
    engine, policy = make_engine(ring_target(), directory)
    (completion,) = run(engine, [[CYCLE[0]] * 2], SamplingParams(max_tokens=31, ignore_eos=True))
    assert list(completion.token_ids) == CYCLE[1:32]
    # 1 from the prompt, then 6 (2-7), 3 (8, 9 and, drawn by the target, 10), 6, 6, 6, and 3 of the last.
    assert policy.accepted == 5 + 2 + 5 + 5 + 5 + 2
    assert policy.verified == 5 + 5 + 5 + 5 + 5 + 2


def test_leaves_are_accepted_and_their_rows_observed(tmp_path: Path) -> None:
    """A head whose second choice is always right: each draft's chain is refused and the leaf beside it taken."""
    directory = ring_head(tmp_path, range(VOCAB), from_features=True, temptation=3.03)
    params = SamplingParams(max_tokens=37, ignore_eos=True)
    prompts = [[CYCLE[0]] * 2, [CYCLE[9]] * 40]
    engine, policy = make_engine(ring_target(), directory, branches=2)
    for prompt, completion in zip(prompts, run(engine, prompts, params), strict=True):
        at = CYCLE.index(prompt[-1])
        assert list(completion.token_ids) == [CYCLE[(at + 1 + i) % VOCAB] for i in range(37)]
    # The prompt gives one token, each step two, and the last two come singly: there is no room for a leaf.
    assert policy.accepted == 2 * 17


def test_wrong_features_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head that is always right is not with the hidden states of the row before."""
    engine, policy = make_engine(ring_target(), ring_head(tmp_path, range(VOCAB), from_features=True))
    hidden = engine.executor.hidden
    monkeypatch.setattr(engine.executor, "hidden", lambda: np.roll(hidden(), 1, axis=0))
    run(engine, [[CYCLE[0], 3]], SamplingParams(max_tokens=37, ignore_eos=True))
    assert policy.accepted < policy.verified


# Configuration


def test_a_configuration_opens_the_drafter(random_head: Path) -> None:
    config = engine_config(
        target().config, num_pages=32, rows=32, max_batch=4, context_length=CONTEXT, speculate=f"eagle:{random_head}"
    )
    engine = Engine(NativeExecutor.load(target(), config), FakeTokenizer(VOCAB), config)
    with pytest.raises(UnsupportedError, match="eagle"):
        use_speculation(engine, config, FakeTokenizer(VOCAB))
    head = find_eagle_head(target(), config, CONTEXT, MEMORY)
    assert head is not None
    assert head.num_bytes > head.config.kv_memory_bytes > 0
    speculator = use_speculation(engine, config, FakeTokenizer(VOCAB), eagle_head=head)
    assert speculator is not None
    assert speculator.name == "eagle"
    assert speculator.observes_hidden
    (drafter,) = speculator.drafters
    assert isinstance(drafter, EagleDrafter)
    assert isinstance(drafter._executor, NativeExecutor)
    assert drafter._executor.lowered.embedding is engine.executor.lowered.embedding  # type: ignore[attr-defined]
    assert drafter._executor.weight_bytes < 2 * 4 * HIDDEN * HIDDEN * 12
    plain, _ = make_engine(target(), None)
    expected = run(plain, PROMPTS, PARAMS["greedy"])
    assert all(same(*pair) for pair in zip(run(engine, PROMPTS, PARAMS["greedy"]), expected, strict=True))


@pytest.mark.parametrize("kind", ["F32", "Q5_0", "Q4G32Z"])
def test_shared_embeddings_are_not_counted(random_head: Path, kind: str) -> None:
    """Whatever they take in the target's memory, which is not what they take in its file."""
    shared = tiny_checkpoint(tiny_config(vocab_size=VOCAB), kinds={"token_embd.weight": kind})
    config = engine_config(
        shared.config, num_pages=32, rows=32, max_batch=4, context_length=CONTEXT, speculate=f"eagle:{random_head}"
    )
    head = find_eagle_head(shared, config, CONTEXT, MEMORY)
    assert head is not None
    drafter = head.open(NativeExecutor.load(shared, config), exact=False)
    assert isinstance(drafter._executor, NativeExecutor)
    vectors = sum(4 * head.checkpoint.header(name).shape[0] for name in head.checkpoint.names() if "norm" in name)
    assert head.num_bytes - (head.config.kv_memory_bytes or 0) == drafter._executor.weight_bytes + vectors


def test_the_pool_of_a_head_is_bounded_by_the_memory(random_head: Path) -> None:
    """All contexts that are used at a time where there is memory, a share of it where there is less, and always one."""

    def pool(available_bytes: int, max_batch: int) -> float:
        config = EngineConfig(speculate=f"eagle:{random_head}", max_batch=max_batch)
        head = find_eagle_head(target(), config, 320, available_bytes)
        assert head is not None
        return (head.config.kv_memory_bytes or 0) / KVLayout.of(head.checkpoint.config, "f16").page_bytes

    one = 320 // PAGE_TOKENS
    page_bytes = KVLayout.of(tiny_config(num_layers=1), "f16").page_bytes
    assert pool(MEMORY, 64) == 8 * one
    assert pool(MEMORY, 3) == 3 * one
    assert pool(8 * page_bytes * (one + 7), 64) == one + 7
    assert pool(0, 64) == one


def test_only_one_head_that_exists(random_head: Path, tmp_path: Path) -> None:
    two = EngineConfig(speculate=f"eagle:{random_head}+eagle:{tmp_path}")
    with pytest.raises(ParameterError, match="one eagle head"):
        find_eagle_head(target(), two, CONTEXT, MEMORY)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find_eagle_head(target(), EngineConfig(speculate=f"eagle:{tmp_path}"), CONTEXT, MEMORY)
    assert find_eagle_head(target(), EngineConfig(speculate="suffix"), CONTEXT, MEMORY) is None
    assert find_eagle_head(target(), EngineConfig(), CONTEXT, MEMORY) is None
