"""Makes the speculator that a configuration asks for: its drafters, and the costs that its controller knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from paceline.config import WEIGHT_FORMATS, DrafterName, EngineConfig, parse_speculate
from paceline.engine.detokenize import TokenText
from paceline.engine.eagle_head import EagleHead
from paceline.engine.engine import Engine
from paceline.engine.executor_choice import ExecutorChoice
from paceline.engine.memory import draft_kv_bytes, workspace_bytes
from paceline.errors import ParameterError, UnsupportedError
from paceline.executors.base import Executor
from paceline.kv.layout import KVLayout
from paceline.speculate.controller import Controller
from paceline.speculate.cost import StepCost, measure_step_cost, still_holds
from paceline.speculate.cost_memory import cost_key, load_step_cost, save_step_cost
from paceline.speculate.draft import Drafter
from paceline.speculate.draft_model import DraftModelDrafter, check_vocabularies
from paceline.speculate.draft_pages import OwnPages, TargetPages
from paceline.speculate.forced import ForcedDrafter
from paceline.speculate.ngram import NgramDrafter
from paceline.speculate.policy import FixedPolicy, Policy
from paceline.speculate.speculator import Speculator
from paceline.speculate.suffix import SuffixDrafter
from paceline.weights.checkpoint import AnyCheckpoint

NUM_ROWS_TO_KEEP = 16
"""A table of less was measured in a hurry, on a machine that was busy: it is not kept for the next start."""

SELF = "self:"
"""``draft:self:WEIGHTS`` is the model itself with other weights."""


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A model that drafts, and how it is loaded: like its target on ``choice``."""

    checkpoint: AnyCheckpoint
    config: EngineConfig
    is_target: bool
    choice: ExecutorChoice

    @property
    def num_bytes(self) -> int:
        """What it takes of the memory: weights, and keys and values where it has its own."""
        own_kv = 0 if self.is_target else self.config.kv_memory_bytes or 0
        workspace = workspace_bytes(self.checkpoint.config, self.config)
        return self.choice.weight_bytes(self.checkpoint, self.config) + workspace + own_kv


def find_draft_model(
    checkpoint: AnyCheckpoint,
    config: EngineConfig,
    context_length: int,
    available_bytes: int,
    choice: ExecutorChoice,
) -> DraftModel | None:
    """The model that ``config.speculate`` names as drafter of ``checkpoint``, not loaded yet; None without one. Its own
    keys and values get a part of ``available_bytes``, but room for one whole context.

    Raises ``ParameterError`` for weights that do not exist, and what opening a model raises.
    """
    from paceline.weights.catalog import resolve_model
    from paceline.weights.checkpoint import open_checkpoint

    names = [name.source for name in parse_speculate(config.speculate or "off") if name.kind == "draft"]
    if not names:
        return None
    if len(names) > 1:
        raise ParameterError("speculate", config.speculate, "one draft model")
    source = names[0]
    if source.startswith(SELF):
        weights = source.removeprefix(SELF)
        if weights not in WEIGHT_FORMATS:
            allowed = f"draft:self: and one of {', '.join(WEIGHT_FORMATS)}"
            raise ParameterError("speculate", config.speculate, allowed)
        as_target = dataclasses.replace(config, weights=weights, head_bits=None)
        return DraftModel(checkpoint, as_target, True, choice)
    draft = open_checkpoint(resolve_model(source))
    own_length = min(context_length, draft.config.context_length)
    own = dataclasses.replace(
        config,
        weights="native",
        head_bits=None,
        context_length=own_length,
        kv_memory_bytes=draft_kv_bytes(
            KVLayout.of(draft.config, config.kv_dtype).page_bytes,
            context_length=own_length,
            max_batch=config.max_batch,
            available_bytes=available_bytes,
        ),
    )
    return DraftModel(draft, own, False, choice)


def use_speculation(
    engine: Engine,
    config: EngineConfig,
    tokenizer: TokenText,
    *,
    draft_model: DraftModel | None = None,
    eagle_head: EagleHead | None = None,
    target: Executor | None = None,
    choice: ExecutorChoice | None = None,
    model_identity: str | None = None,
) -> Speculator | None:
    """Has ``engine``, which has not run yet, verify what the drafters of ``config.speculate`` propose.

    ``target`` is the executor that was loaded, where the engine has got one around it; a draft model runs on ``choice``
    as well (None: natively).
    What steps cost is measured now; with a ``model_identity`` only if what was measured and kept before does not hold.
    """
    names = parse_speculate(config.speculate or "off")
    if not names:
        return None
    executor = engine.executor
    below = target or executor
    drafters = [
        _open(name, engine, below, config, tokenizer, draft_model, eagle_head, choice or ExecutorChoice())
        for name in names
    ]
    policy: Policy
    if config.draft_tokens is not None:
        policy = FixedPolicy(config.draft_tokens)
    else:
        policy = Controller(_step_cost(executor, config, model_identity), max_rows=engine.max_speculated_rows)
    speculator = Speculator(drafters, policy, vocab_size=executor.model.vocab_size)
    engine.use_speculator(speculator)
    return speculator


def _step_cost(executor: Executor, config: EngineConfig, model_identity: str | None) -> StepCost:
    if model_identity is None:
        return measure_step_cost(executor)
    key = cost_key(f"{model_identity} {config.weights} {config.head_bits}", executor.path())
    cost = load_step_cost(key)
    if cost is None or not still_holds(cost, executor):
        cost = measure_step_cost(executor)
        if max(cost.measured) >= NUM_ROWS_TO_KEEP:
            save_step_cost(key, cost)
    return cost


def _open(
    name: DrafterName,
    engine: Engine,
    target: Executor,
    config: EngineConfig,
    tokenizer: TokenText,
    draft_model: DraftModel | None,
    eagle_head: EagleHead | None,
    choice: ExecutorChoice,
) -> Drafter:
    if name.kind == "suffix":
        return SuffixDrafter()
    if name.kind == "ngram":
        return NgramDrafter()
    if name.kind == "forced":
        return ForcedDrafter()
    if name.kind == "eagle" and eagle_head is not None:
        return eagle_head.open(target, exact=config.acceptance == "exact")
    if name.kind == "eagle" or draft_model is None:
        raise UnsupportedError(f"speculate {name.kind}:{name.source}: it needs a model that is loaded by name")
    return _open_draft_model(draft_model, engine, target, config, tokenizer, choice)


def _open_draft_model(
    draft_model: DraftModel,
    engine: Engine,
    target: Executor,
    config: EngineConfig,
    tokenizer: TokenText,
    choice: ExecutorChoice,
) -> DraftModelDrafter:
    from paceline.text.tokenizer import load_tokenizer

    vocab_size = engine.executor.model.vocab_size
    exact = config.acceptance == "exact"
    if draft_model.is_target:
        same = dataclasses.replace(config, weights=draft_model.config.weights, head_bits=None)
        executor = choice.load(draft_model.checkpoint, same, num_pages=target.num_pages, pages_of=target)
        return DraftModelDrafter(executor, TargetPages(engine.scheduler.kv), vocab_size=vocab_size, exact=exact)
    check_vocabularies(tokenizer, load_tokenizer(draft_model.checkpoint))
    own = draft_model.config
    num_pages = (own.kv_memory_bytes or 0) // KVLayout.of(draft_model.checkpoint.config, own.kv_dtype).page_bytes
    executor = choice.load(draft_model.checkpoint, own, num_pages=num_pages)
    pages = OwnPages(
        executor,
        max_sequences=own.max_batch,
        context_length=own.context_length,
        prefix_cache=config.prefix_cache,
    )
    return DraftModelDrafter(executor, pages, vocab_size=vocab_size, exact=exact)


def identity_of(files: Sequence[Path]) -> str:
    """Names the files of a model as they are now, without reading them."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return " ".join(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats)
