"""GGUF files of mixtures of experts, and gpt-oss in MXFP4: the logits that Transformers computes from the directory.

Bounds: golden_models.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from expert_files import gpt_oss, mixtral, qwen3, write_gguf
from golden_models import (
    F16_PAGES,
    FLOAT,
    NUM_TOKENS,
    SHAPE,
    Saved,
    error,
    logits_of_native,
    logits_of_reference,
    prompt,
    saved_cases,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.errors import PacelineError
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import Checkpoint

CASES = {
    "llama": mixtral(),
    "qwen3moe": replace(qwen3(norm_topk_prob=True), seed=3),
    "gpt-oss": replace(gpt_oss(num_hidden_layers=3), seed=3),
}
PACKED = gpt_oss(intermediate_size=96)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_cases(CASES, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_has_the_logits_of_the_directory(name: str, saved: Saved, tmp_path: Path) -> None:
    directory, logits = saved(name)
    found = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", name))
    rope = replace(found.config.rope, theta=pytest.approx(found.config.rope.theta))
    assert open_checkpoint(directory).config == replace(found.config, rms_norm_eps=1e-5, rope=rope)
    assert error(logits_of_reference(found), logits["float"]) < FLOAT
    assert error(logits_of_native(found, NUM_TOKENS), logits["f16"]) < F16_PAGES


# ---- MXFP4 ----


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with random planes in place of experts, and the model that Transformers makes of them."""
    directory = tmp_path_factory.mktemp("packed")
    model, planes = _model_of_planes()
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    plain = safetensors.torch.load_file(file)
    for name in planes:
        plain.pop(name.removesuffix("_blocks"), None)
    safetensors.torch.save_file(plain | planes, file, {"format": "pt"})
    values = json.loads((directory / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(values))
    return directory, model


def _model_of_planes() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    rng = np.random.default_rng(5)
    model = PACKED.model(PACKED.config(**({"initializer_range": 0.15} | SHAPE | PACKED.changes))).eval()
    planes = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, outputs = parameter.shape
                blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
                scales = rng.integers(121, 125, blocks.shape[:3], dtype=np.uint8)
                both = torch.from_numpy(blocks), torch.from_numpy(scales)
                planes |= {f"{name}_blocks": both[0], f"{name}_scales": both[1]}
                parameter.copy_(convert_moe_packed_tensors(*both, dtype=torch.float32))
            elif parameter.dim() == 1 or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model, planes


def _logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.from_numpy(prompt().tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()


def _check_planes(checkpoint: Checkpoint, model: Any) -> None:
    """Every weight of every expert, bit for bit."""
    for layer, block in enumerate(model.model.layers):
        fused = block.mlp.experts.gate_up_proj.detach().numpy().transpose(0, 2, 1)
        down = block.mlp.experts.down_proj.detach().numpy().transpose(0, 2, 1)
        for part, expected in (("gate", fused[:, 0::2]), ("up", fused[:, 1::2]), ("down", down)):
            raw = checkpoint.tensor(f"blk.{layer}.ffn_{part}_exps.weight")
            assert raw.kind == "MXFP4"
            assert np.array_equal(dequantize(raw), expected)


def test_mxfp4_planes_of_a_directory(packed: tuple[Path, Any]) -> None:
    directory, model = packed
    checkpoint = open_checkpoint(directory)
    _check_planes(checkpoint, model)
    assert error(logits_of_reference(checkpoint), _logits(model)) < FLOAT


def test_mxfp4_blocks_of_a_gguf_file(packed: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = packed
    checkpoint = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", "gpt-oss"))
    _check_planes(checkpoint, model)
    assert error(logits_of_reference(checkpoint), _logits(model)) < FLOAT


@pytest.mark.parametrize("plane", ["blocks", "scales"])
def test_a_lost_plane_is_an_error_that_names_it(plane: str, packed: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(packed[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors[f"model.layers.1.mlp.experts.down_proj_{plane}"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PacelineError, match=r"model\.layers\.1\.mlp\.experts\.down_proj_"):
        open_checkpoint(tmp_path)
