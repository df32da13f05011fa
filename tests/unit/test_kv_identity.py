"""Keys of stores and domains: whatever decides a bit of a page must change the key, and what does not must not."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from tiny_models import tiny_config

from paceline.config import EngineConfig, Experts, RopeConfig, RopeScaling
from paceline.kv.identity import StoreKey, digest, domain_key, store_key

SCALING = RopeScaling("factors", 2.0, 1.0, 4.0, 8192, (1.0, 2.0), (3.0, 4.0))
LOCAL = RopeConfig(100.0, 16, RopeScaling("yarn"))
EXPERTS = Experts(4, 2, 32)
MODEL = tiny_config(
    rope=RopeConfig(10000.0, 16, SCALING),
    sliding_window=64,
    draft_vocab_size=40,
    windowed_layers=(True, False),
    local_rope=LOCAL,
    unrotated_layers=(0, 1),
    attention_scale=0.5,
    attention_softcap=50.0,
    logit_softcap=30.0,
    experts=EXPERTS,
)
HASH = bytes(range(32))


def changes_of(value: Any) -> list[Any]:
    """Values of the same type, or of a dataclass with one field changed, down to the last level."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            dataclasses.replace(value, **{field.name: changed})
            for field in dataclasses.fields(value)
            for changed in changes_of(getattr(value, field.name))
        ]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, bytes):
        return [bytes([value[0] ^ 1]) + value[1:], value[:-1] + bytes([value[-1] ^ 128])]
    assert isinstance(value, tuple)
    return [(*value, 1.0), value[:-1], value[::-1]] if value else [(1.0,)]


def key_of(config: EngineConfig | None = None, **changes: Any) -> StoreKey:
    arguments = {"model": MODEL, "config": config or EngineConfig(), "model_hash": HASH, "executor": "native"}
    arguments |= changes
    return store_key(arguments.pop("model"), arguments.pop("config"), **arguments)


def test_every_field_down_to_the_last_level_changes_the_digest() -> None:
    key = key_of()
    changed = changes_of(key)
    parts = (key, key.model, key.model.rope, SCALING, LOCAL, LOCAL.scaling, EXPERTS)
    num_leaves = sum(len(dataclasses.fields(part)) for part in parts) - len(parts) + 1
    assert len(changed) >= num_leaves
    digests = {other.digest() for other in (key, *changed)}
    assert len(digests) == len(changed) + 1
    assert {len(value) for value in digests} == {32}
    assert key_of().digest() == key.digest()


def test_settings_that_change_bits_change_the_key() -> None:
    keys = [
        key_of(),
        key_of(EngineConfig(weights="int8")),
        key_of(EngineConfig(weights="int4")),
        key_of(EngineConfig(kv_dtype="int8")),
        key_of(EngineConfig(kv_dtype="bf16")),
        key_of(EngineConfig(head_bits="bf16")),
        key_of(executor="reference"),
        key_of(model=dataclasses.replace(MODEL, sliding_window=None)),
        key_of(model=dataclasses.replace(MODEL, rope=RopeConfig(10000.0, 16))),
        key_of(model_hash=bytes(32)),
    ]
    assert len({key.digest() for key in keys}) == len(keys)


def test_settings_that_change_no_bit_keep_the_key() -> None:
    other = EngineConfig(num_threads=3, isa="scalar", max_batch=2, token_budget=16, seed=5, context_length=64)
    assert key_of(other).digest() == key_of().digest()
    untied = dataclasses.replace(MODEL, tie_embeddings=False)
    head = key_of(EngineConfig(head_bits="bf16"), model=untied)
    assert head.digest() == key_of(model=untied).digest(), "a head that is not tied changes logits only"


def test_a_key_is_described_for_people() -> None:
    described = json.loads(json.dumps(key_of().describe()))
    assert described["model_hash"] == HASH.hex()
    assert described["model"]["rope"]["theta"] == 10000.0
    assert described["kv_dtype"] == "f16"


def test_no_two_lists_of_fields_are_alike() -> None:
    lists: list[tuple[object, ...]] = [
        (),
        (None,),
        (False,),
        (True,),
        (0,),
        (1,),
        (1.0,),
        (-0.0,),
        (0.0,),
        ("1",),
        (b"1",),
        ("",),
        ("", ""),
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        (("a", "b"),),
        ("a", "b"),
        (("a",), "b"),
        ((),),
        (RopeConfig(1.0, 2),),
        (("theta", 1.0), ("dim", 2), ("scaling", None)),
    ]
    for one, other in itertools.combinations(lists, 2):
        assert digest("label", *one) != digest("label", *other), (one, other)
    assert digest("a", "b") != digest("b", "b")
    with pytest.raises(AssertionError, match="list has no encoding"):
        digest("label", [1])


def test_domains_are_apart() -> None:
    names = ["", "a", "b", "A", "a ", "\x00", "한국", "\ud800"]
    assert len({domain_key(name) for name in names}) == len(names)
    assert domain_key("a") == domain_key("a")
    assert len(domain_key("a")) == 32
