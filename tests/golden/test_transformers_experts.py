"""Logits of tiny random mixtures of experts (Mixtral, Qwen3-MoE, gpt-oss) against Transformers.

Bounds: golden_models.py. A router that is near a tie may choose other experts after one rounding, so seeds are such
that none is, see ``test_no_router_is_near_a_tie``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_files import YARN, gpt_oss, mixtral, qwen3
from golden_models import (
    FLOAT,
    FLOAT_LOGITS,
    NUM_TOKENS,
    SEEN,
    WINDOW,
    Altered,
    Change,
    Saved,
    assert_floats_agree,
    assert_mistake_is_seen,
    assert_native_agrees,
    error,
    logits_of_reference,
    prompt,
    saved_cases,
    with_fields,
    with_scaling,
)

from paceline.config import Experts, ModelConfig, RopeConfig
from paceline.ops import reference
from paceline.ops.reference import Table
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import RawTensor

MARGIN = 5e-3
"""Between logits of the last expert that is chosen and the first that is not: ten times what f16 pages move."""


CASES = {
    "mixtral": mixtral(),
    "mixtral-window-bf16": replace(mixtral(sliding_window=WINDOW, num_local_experts=3), dtype=torch.bfloat16, seed=2),
    "qwen3moe": replace(qwen3(), seed=3),
    "qwen3moe-normalised-tied": replace(qwen3(norm_topk_prob=True, tie_word_embeddings=True), seed=11),
    "qwen3moe-step": replace(
        qwen3(decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=4, norm_topk_prob=True), seed=2
    ),
    "qwen3moe-biases-window": replace(
        qwen3(attention_bias=True, use_sliding_window=True, sliding_window=WINDOW), seed=7
    ),
    "gpt-oss": replace(gpt_oss(num_hidden_layers=3), seed=3),
    "gpt-oss-clamped-bf16": replace(gpt_oss(initializer_range=0.4), dtype=torch.bfloat16, seed=2),
    "gpt-oss-layers": replace(
        gpt_oss(layer_types=["full_attention", "sliding_attention"], attention_bias=False), seed=9
    ),
    "gpt-oss-truncated": replace(gpt_oss(rope_parameters=YARN | {"truncate": True, "attention_factor": 1.3}), seed=4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(CASES, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_no_router_is_near_a_tie(name: str, saved: Saved) -> None:
    """Else the other tests would ask for luck."""
    directory, _ = saved(name)
    model = CASES[name].model.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.from_numpy(prompt().tokens.astype(np.int64))[None]
        routers = model(ids, use_cache=False, output_router_logits=True).router_logits
    chosen = model.config.num_experts_per_tok
    for logits in routers:
        ranked = logits.reshape(NUM_TOKENS, -1).sort(dim=1, descending=True).values
        assert float((ranked[:, chosen - 1] - ranked[:, chosen]).min()) > MARGIN


@pytest.mark.parametrize("executor", FLOAT_LOGITS)
@pytest.mark.parametrize("name", CASES)
def test_float_executors_have_the_logits_of_transformers(name: str, executor: str, saved: Saved) -> None:
    assert_floats_agree(saved, name, executor)


@pytest.mark.parametrize("name", CASES)
def test_native_has_the_logits_of_transformers(name: str, saved: Saved) -> None:
    assert_native_agrees(saved, name)


def _experts(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.experts, Experts)
        return replace(config, experts=replace(config.experts, **changes))

    return change


MISTAKES: dict[str, tuple[str, Change]] = {
    "weights over all experts": ("mixtral", _experts(normalise=False)),
    "one expert less": ("mixtral", _experts(num_chosen=1)),
    "one expert more": ("mixtral", _experts(num_chosen=3)),
    "other theta": ("mixtral", with_fields(rope=RopeConfig(510.0, 16))),
    "window ignored": ("mixtral-window-bf16", with_fields(sliding_window=None)),
    "weights over the chosen experts": ("qwen3moe", _experts(normalise=True)),
    "weights over all experts (qwen3)": ("qwen3moe-normalised-tied", _experts(normalise=False)),
    "norms of heads ignored": ("qwen3moe", with_fields(architecture="mixtral", qk_norm=False)),
    "biases ignored": ("qwen3moe-biases-window", with_fields(attention_bias=False)),
    "bias of the output ignored": ("qwen3moe-biases-window", with_fields(output_bias=False)),
    "window one too long": ("qwen3moe-biases-window", with_fields(sliding_window=WINDOW + 1)),
    "sinks ignored": ("gpt-oss", with_fields(attention_sinks=False)),
    "biases ignored (gpt-oss)": ("gpt-oss", with_fields(attention_bias=False)),
    "bias of the output ignored (gpt-oss)": ("gpt-oss", with_fields(output_bias=False)),
    "biases of experts ignored": ("gpt-oss", _experts(biases=False)),
    "weights over all experts (gpt-oss)": ("gpt-oss", _experts(normalise=False)),
    "SiLU": ("gpt-oss", with_fields(activation="silu")),
    "no layer has the window": ("gpt-oss", with_fields(sliding_window=None)),
    "every layer has the window": ("gpt-oss", with_fields(windowed_layers=())),
    "the other layers have the window": ("gpt-oss", with_fields(windowed_layers=(False, True, False))),
    "layer_types ignored": ("gpt-oss-layers", with_fields(windowed_layers=(True, False))),
    "window one too long (gpt-oss)": ("gpt-oss", with_fields(sliding_window=WINDOW + 1)),
    "yarn ignored": ("gpt-oss", with_fields(rope=RopeConfig(1000.0, 16))),
    "ramp between whole pairs": ("gpt-oss", with_scaling(truncate=True)),
    "attention not scaled": ("gpt-oss", with_scaling(attention_factor=1.0)),
    "another trained context": ("gpt-oss", with_scaling(original_context=72)),
    "ramp begins elsewhere": ("gpt-oss", with_scaling(beta_fast=5.0)),
    "ramp ends elsewhere": ("gpt-oss", with_scaling(beta_slow=1.3)),
    "another factor": ("gpt-oss", with_scaling(factor=12.0)),
    "attention_factor ignored": ("gpt-oss-truncated", with_scaling(attention_factor=1.0 + 0.1 * np.log(8.0))),
    "truncate ignored": ("gpt-oss-truncated", with_scaling(truncate=False)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_reader_is_seen(mistake: str, saved: Saved) -> None:
    assert_mistake_is_seen(saved, *MISTAKES[mistake])


def test_the_clamp_of_activations_matters(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_clamp(gate: Table, up: Table, activation: str) -> Table:
        assert activation == "swiglu_oai"
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    directory, logits = saved("gpt-oss-clamped-bf16")
    monkeypatch.setattr(reference, "activated", without_clamp)
    assert error(logits_of_reference(open_checkpoint(directory)), logits["float"]) > SEEN * FLOAT


@dataclass
class Moved:
    """A checkpoint some of whose tensors another function made of what it holds."""

    checkpoint: Any
    change: Callable[[Any, str], RawTensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def tensor(self, name: str) -> RawTensor:
        return self.change(self.checkpoint, name)


def _exchanged(checkpoint: Any, name: str) -> RawTensor:
    """Gate for up."""
    part = name.split(".")[-2]
    other = {"ffn_gate_exps": "ffn_up_exps", "ffn_up_exps": "ffn_gate_exps"}.get(part, part)
    return replace(checkpoint.tensor(name.replace(part, other)), name=name)


def _halves(checkpoint: Any, name: str) -> RawTensor:
    """Outputs of gate and up that lie in turn read as halves."""
    part = name.split(".")[-2]
    if part not in ("ffn_gate_exps", "ffn_up_exps"):
        return checkpoint.tensor(name)
    raws = [checkpoint.tensor(name.replace(part, f"ffn_{each}_exps")) for each in ("gate", "up")]
    gate, up = (raw.data.view(np.float32).reshape(raw.shape) for raw in raws)
    in_turn = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
    half = np.split(in_turn, 2, axis=1)[part == "ffn_up_exps"]
    return replace(raws[0], name=name, data=np.ascontiguousarray(half).reshape(-1).view(np.uint8))


def _next_expert(checkpoint: Any, name: str) -> RawTensor:
    """Experts of the down projection in another order."""
    raw = checkpoint.tensor(name)
    if "ffn_down_exps" not in name:
        return raw
    return replace(raw, data=np.roll(raw.data.reshape(raw.shape[0], -1), 1, axis=0).reshape(-1))


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("change", [_exchanged, _halves, _next_expert])
def test_experts_read_in_another_order_are_seen(name: str, change: Any, saved: Saved) -> None:
    directory, logits = saved(name)
    assert error(logits_of_reference(Moved(open_checkpoint(directory), change)), logits["float"]) > SEEN * FLOAT


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("qwen3moe-biases-window", f"blk.1.attn_{x}.bias") for x in ("q", "k", "v", "output")]
    + [("gpt-oss", f"blk.1.attn_{x}.bias") for x in ("q", "k", "v", "output")]
    + [("gpt-oss", f"blk.1.ffn_{x}.bias") for x in ("gate_inp", "gate_exps", "up_exps", "down_exps")],
)
def test_a_lost_vector_of_one_layer_is_seen(name: str, tensor: str, saved: Saved) -> None:
    directory, logits = saved(name)
    checkpoint = open_checkpoint(directory)
    altered = Altered(checkpoint, checkpoint.config, checkpoint.interleaved_rope, zeroed=tensor)
    assert error(logits_of_reference(altered), logits["float"]) > SEEN * FLOAT


# ---- other spellings of the same model ----


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe-step"])
def test_experts_in_one_tensor_are_read(name: str, saved: Saved, tmp_path: Path) -> None:
    """As Transformers 5 has them in memory, and writes them where it is asked to."""
    directory, _ = saved(name)
    model = CASES[name].model.from_pretrained(directory, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    found, expected = open_checkpoint(tmp_path), open_checkpoint(directory)
    assert found.config == expected.config
    assert set(found.names()) == set(expected.names())
    for tensor in expected.names():
        assert found.header(tensor) == expected.header(tensor)
        assert np.array_equal(found.tensor(tensor).data, expected.tensor(tensor).data), tensor


def test_configurations_of_released_models(saved: Saved, tmp_path: Path) -> None:
    """Keys as they stand in Qwen3-30B-A3B's and gpt-oss-20b's own files."""
    for name in ("qwen3moe", "gpt-oss"):
        directory, _ = saved(name)
        values = json.loads((directory / "config.json").read_text())
        expected = open_checkpoint(directory)
        ropes = values.pop("rope_parameters")
        values["rope_theta"] = ropes.pop("rope_theta")
        if name == "qwen3moe":
            values["num_experts"] = values.pop("num_local_experts")
        else:
            values |= {"rope_scaling": ropes, "experts_per_token": 2}
            del values["layer_types"], values["swiglu_alpha"], values["attention_bias"]
        target = tmp_path / name
        target.mkdir()
        (target / "model.safetensors").symlink_to(directory / "model.safetensors")
        (target / "config.json").write_text(json.dumps(values))
        assert open_checkpoint(target).config == expected.config
