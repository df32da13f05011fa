"""Verification under every sampling parameter: the law of sampled drafts, and the very tokens of coupled draws."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from enumerated_law import EXACT, WRONG, Distribution, Drafting, Tokens, law_error, path_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sampling.distribution import probabilities
from paceline.sampling.draw import choose
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import SampleRows, greedy_rows
from paceline.speculate.chance import Chance
from paceline.speculate.draft import Draft
from paceline.speculate.verify import Accepted, Target, accept, accept_chain_by_token, accept_drawn, accept_tree

PROMPT = (1, 0)
VOCAB = 4
FIELDS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "logit_bias": {"bias": {0: 1.5, 2: -2.0}},
    "banned": {"min_tokens": 2},
    "all": {
        "temperature": 0.9,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "bias": {1: 0.5},
        "min_tokens": 1,
    },
}


@dataclass(frozen=True)
class Sampler:
    """A target whose logits depend on the whole history, with sampling parameters whose lists do as well.

    min_tokens  token 3 is banned until the output has so many
    """

    seed: int
    fields: dict[str, float]
    bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    vocab_size: int = VOCAB

    def logits(self, output: Tokens) -> NDArray[np.float32]:
        rng = np.random.default_rng([self.seed, *PROMPT, *output])
        return (1.5 * rng.standard_normal(self.vocab_size)).astype(np.float32)

    def row(self, output: Tokens, seen: Tokens) -> SampleRows:
        """The record of the draw after ``output``, whose lists know ``seen``."""
        rows = greedy_rows(1).rows
        rows["temperature"], rows["seed"], rows["position"] = 1.0, self.seed, len(PROMPT) + len(output)
        for name, value in self.fields.items():
            rows[name] = value
        lists = ListsBuilder(rows)
        known = sorted({*PROMPT, *seen})
        lists.add_counts(0, np.array(known, np.int32), np.array([seen.count(token) for token in known], np.int32))
        lists.add_bias(0, np.array([*self.bias], np.int32), np.array([*self.bias.values()], np.float32))
        if len(seen) < self.min_tokens:
            lists.add_banned(0, np.array([3], np.int32))
        return lists.build()

    def p(self, output: Tokens, seen: Tokens | None = None) -> Distribution:
        samples = self.row(output, output if seen is None else seen)
        return probabilities(self.logits(output), samples.rows[0], samples)

    def drawn(self, output: Tokens) -> int:
        samples = self.row(output, output)
        return choose(self.logits(output), samples.rows[0], samples)


def sampler(name: str, seed: int) -> Sampler:
    fields = dict(FIELDS[name])
    bias, min_tokens = fields.pop("bias", {}), fields.pop("min_tokens", 0)
    return Sampler(seed, fields, bias, min_tokens)


@pytest.mark.parametrize("name", FIELDS)
def test_the_law_under_each_parameter(name: str) -> None:
    target, q = sampler(name, 5), cache(Sampler(6, {"temperature": 1.4}).p)
    for parents, certain in (((0, 1), ()), ((0, 1), (0,)), ((0, 0, 1), ()), ((0, 0, 1), (0, 2)), ((0, 0), (0, 1))):
        drafting = Drafting(parents, q, frozenset(certain))
        for verify in (accept, accept_tree, accept_chain_by_token):
            if verify is not accept_chain_by_token or parents == (0, 1):
                assert law_error(verify, target.p, drafting, horizon=3) < EXACT, (parents, certain)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "banned", "all"])
def test_a_target_whose_lists_leave_the_draft_out_fails(name: str) -> None:
    target, drafting = sampler(name, 5), Drafting((0, 1), cache(Sampler(6, {"temperature": 1.4}).p))

    def wrong(draft: Draft, p: Target, chance: Chance) -> Accepted:
        return accept(draft, lambda row: target.p(path_tokens(draft, row), seen=()), chance)

    assert law_error(wrong, target.p, drafting, horizon=3) > WRONG


# Draws that are coupled by the seed, or by there being no choice.


def greedy(draft: Draft, p: Target, chance: Chance) -> Accepted:
    """A step at temperature 0, where a draw has one outcome."""
    drawn = [int(np.argmax(p(row))) for row in range(len(draft) + 1)]
    rows = accept_drawn(draft, drawn)
    return Accepted(tuple(rows), drawn[rows[-1] if rows else 0])


@pytest.mark.parametrize("parents", [(0, 1, 2), (0, 0, 1, 2)], ids=["chain", "tree"])
def test_temperature_0_by_the_ratio_of_softmaxes_fails(parents: Tokens) -> None:
    target = sampler("temperature 0", 5)
    drafting = Drafting(parents, cache(Sampler(6, {"temperature": 1.4}).p))

    softmax = cache(replace(target, fields={"temperature": 1.0}).p)

    def by_ratio(draft: Draft, p: Target, chance: Chance) -> Accepted:
        rows = accept_tree(draft, lambda row: softmax(path_tokens(draft, row)), chance).rows
        return Accepted(rows, int(np.argmax(p(rows[-1] if rows else 0))))

    assert law_error(greedy, target.p, drafting, horizon=4) < EXACT
    assert law_error(by_ratio, target.p, drafting, horizon=4) > WRONG


def some_tree(target: Sampler, output: Tokens, rng: np.random.Generator) -> Draft:
    """Any tree at all, which often holds what the target is going to draw."""
    tokens: list[int] = []
    parents: list[int] = []
    draft = Draft((), (), (), "test")
    for node in range(int(rng.integers(0, 8))):
        parent = int(rng.integers(0, node + 1)) if rng.random() < 0.5 else node
        siblings = [tokens[row - 1] for row in draft.children(parent)]
        left = [token for token in range(target.vocab_size) if token not in siblings]
        if not left:
            break
        truth = target.drawn((*output, *path_tokens(draft, parent)))
        tokens.append(truth if truth in left and rng.random() < 0.7 else int(rng.choice(left)))
        parents.append(parent)
        draft = Draft(tuple(tokens), tuple(parents), (1.0,) * len(tokens), "test")
    return draft


def speculated(target: Sampler, length: int, rng: np.random.Generator) -> tuple[Tokens, int]:
    """At least ``length`` tokens, and how many steps they took."""
    output: Tokens = ()
    num_steps = 0
    while len(output) < length:
        draft = some_tree(target, output, rng)
        drawn = [target.drawn((*output, *path_tokens(draft, row))) for row in range(len(draft) + 1)]
        rows = accept_drawn(draft, drawn)
        last = rows[-1] if rows else 0
        assert rows == draft.path(last)
        output = (*output, *path_tokens(draft, last), drawn[last])
        num_steps += 1
    return output, num_steps


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FIELDS)), seed=st.integers(0, 2**32), draft_seed=st.integers(0, 2**32))
def test_coupled_tokens_are_those_of_no_draft(name: str, seed: int, draft_seed: int) -> None:
    target = sampler(name, seed)
    output, _ = speculated(target, 10, np.random.default_rng(draft_seed))
    plain: Tokens = ()
    while len(plain) < len(output):
        plain = (*plain, target.drawn(plain))
    assert output == plain


def test_coupled_drafts_are_accepted() -> None:
    output, num_steps = speculated(sampler("temperature", 3), 60, np.random.default_rng(0))
    assert len(output) / num_steps > 1.5


def test_the_accepted_path_is_the_one_that_was_drawn() -> None:
    #        row:  1  2  3  4  5
    draft = Draft((7, 5, 6, 7, 5), (0, 0, 2, 2, 4), (1.0,) * 5, "test")
    cases = {(5, 0, 7, 0, 5, 1): [2, 4, 5], (5, 0, 7, 0, 6, 1): [2, 4], (7, 7, 7, 7, 7, 7): [1], (6, 7, 7, 7, 5, 7): []}
    for drawn, rows in cases.items():
        assert accept_drawn(draft, drawn) == rows
    assert accept_drawn(draft.keep([]), [3]) == []
    with pytest.raises(AssertionError, match="one drawn token a row"):
        accept_drawn(draft, [5, 0])
