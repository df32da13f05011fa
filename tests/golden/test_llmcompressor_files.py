"""Files that llm-compressor makes of a tiny model: the weights that Transformers dequantises, bit for bit.

llm-compressor wants another transformers than the other tests, so this is skipped where it is not installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.safetensors import canonical_name

KINDS = {"W4A16": "Q4G128", "W4A16_ASYM": "Q4G128Z", "W8A16": "Q8G128", "W8A8": "Q8C"}


@pytest.mark.parametrize("scheme", KINDS)
def test_weights_are_those_of_transformers(tmp_path: Path, scheme: str) -> None:
    llmcompressor = pytest.importorskip("llmcompressor")
    from llmcompressor.modifiers.quantization import QuantizationModifier

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=160, num_hidden_layers=2, head_dim=32, max_position_embeddings=128, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    llmcompressor.oneshot(model=model, recipe=recipe, pipeline="datafree")
    model.save_pretrained(tmp_path / "quantised", save_compressed=True)

    quantization = CompressedTensorsConfig(dequantize=True)
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path / "quantised", dtype=torch.bfloat16, quantization_config=quantization
    )
    checkpoint = open_checkpoint(tmp_path / "quantised")
    kinds = set()
    for name, parameter in loaded.named_parameters():
        if name.endswith(".weight") and parameter.dim() == 2:
            tensor = checkpoint.tensor(canonical_name(name))
            assert torch.equal(torch.tensor(dequantize(tensor)).to(parameter.dtype), parameter), name
            kinds.add(tensor.kind)
    assert kinds == {KINDS[scheme], "BF16"}
