"""The pass with gradients: its logits are the reference executor's, its gradients those of finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_variants import FAMILIES, VARIANTS
from tiny_models import tiny_checkpoint, tiny_config
from token_sequences import engine_config, random_sequences, run_chunks

from paceline.config import Experts, ModelConfig
from paceline.executors.reference import ReferenceExecutor
from paceline.executors.torch.forward import TorchModel
from paceline.models import registry

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "qwen2": {"architecture": "qwen2", "attention_bias": True, "sliding_window": 9},
    "qwen3": {"architecture": "qwen3", "qk_norm": True},
    "qwen3moe": {"architecture": "qwen3moe", "qk_norm": True, "experts": Experts(4, 2, 48, normalise=False)},
    **VARIANTS,
}


@pytest.fixture(autouse=True)
def _variants_are_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", registry.FAMILIES + FAMILIES)


def config_of(name: str) -> ModelConfig:
    return tiny_config(**CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_reference(name: str) -> None:
    """Up to the order of sums: some twenty of at most 96 terms, in units of the logits' root mean square."""
    checkpoint = tiny_checkpoint(config_of(name))
    engine = engine_config(checkpoint.config, num_pages=8, kv_dtype="f32")
    reference = ReferenceExecutor.load(checkpoint, engine, num_pages=8, activations="float")
    sequences = random_sequences([80, 80], checkpoint.config.vocab_size)
    tokens = torch.from_numpy(np.stack([sequence.tokens for sequence in sequences]).astype(np.int64))
    found = TorchModel.load(checkpoint).logits(tokens).numpy()
    for sequence, logits in zip(sequences, found, strict=True):
        expected = run_chunks(reference, sequence, 80)
        assert np.abs(logits - expected).max() < 1e-4 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_a_window_about_as_long_as_the_sequence(length: int) -> None:
    """The window of this model is 9: what comes later changes nothing, whichever form of attention a length takes."""
    model = TorchModel.load(tiny_checkpoint(config_of("qwen2")))
    tokens = torch.from_numpy(random_sequences([40], model.model.vocab_size)[0].tokens.astype(np.int64))[None]
    found, expected = model.logits(tokens[:, :length]), model.logits(tokens)[:, :length]
    assert (found - expected).abs().max() < 1e-4 * expected.square().mean().sqrt()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_slopes(name: str) -> None:
    """Along a direction d in all parameters at once: (L(w + h d) - L(w - h d)) / 2h = grad L . d, with an error of h^2
    and one of eps |L| / h, both about 1e-4 here; and every parameter has a gradient."""
    model = TorchModel.load(tiny_checkpoint(config_of(name)), requires_grad=True)
    tokens = torch.from_numpy(random_sequences([40], model.model.vocab_size)[0].tokens.astype(np.int64))[None]

    def loss() -> torch.Tensor:
        logits = model.logits(tokens)
        return torch.nn.functional.cross_entropy(logits[0, :-1].double(), tokens[0, 1:])

    loss().backward()
    gradients = {key: parameter.grad for key, parameter in model.parameters.items()}
    generator = torch.Generator().manual_seed(0)
    slope, direction = 0.0, {}
    for key, parameter in model.parameters.items():
        gradient = gradients[key]
        assert gradient is not None, key
        assert gradient.abs().max() > 0, key
        # Half along the gradient, so that the slope is far from zero.
        noise = torch.randn(parameter.shape, generator=generator)
        direction[key] = gradient / gradient.norm() + noise / noise.norm()
        slope += float((gradient.double() * direction[key].double()).sum())
    step, sides = 3e-3, []
    with torch.no_grad():
        for sign in (1.0, -2.0):
            for key, parameter in model.parameters.items():
                parameter += sign * step * direction[key]
            sides.append(float(loss()))
    assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(slope, rel=5e-3)


def test_gradients_hold_where_exp_overflows() -> None:
    """Gates far below zero, whose sigmoid is 0: a product with the derivative of 1 / (1 + exp(-x)) would be no
    number."""
    model = TorchModel.load(tiny_checkpoint(tiny_config()), requires_grad=True)
    with torch.no_grad():
        for key, parameter in model.parameters.items():
            if "ffn_gate" in key:
                parameter *= 1000.0
    model.logits(torch.arange(12)[None]).square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters.values())


def test_parameters_may_be_computed_from_others() -> None:
    """A low-rank addition to one matrix, whose factors are what is trained."""
    model = TorchModel.load(tiny_checkpoint(tiny_config()))
    tokens = torch.arange(10)[None]
    before = model.logits(tokens)
    frozen = model.parameters["blk.0.ffn_up.weight"]
    left = torch.zeros((len(frozen), 2), requires_grad=True)
    right = torch.randn((2, frozen.shape[1]), requires_grad=True)
    model.parameters["blk.0.ffn_up.weight"] = frozen + left @ right
    after = model.logits(tokens)
    assert torch.equal(before, after)
    after.square().mean().backward()
    assert left.grad is not None
    assert left.grad.abs().max() > 0
    assert frozen.grad is None
