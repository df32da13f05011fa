"""Quantised directories loaded by Transformers, in float32, and what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounded_models import RoundedModel
from transformers import AutoModelForCausalLM

from paceline.quantize.export.tensors import half_split_rows, huggingface_name, with_rows


def load(path: Path) -> Any:
    """The model in float32."""
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """The tokens that follow."""
    with torch.no_grad():
        mask = torch.ones(1, len(ids))
        out = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, attention_mask=mask)
    return list(out[0, len(ids) :].tolist())


def check_weights(loaded: Any, model: RoundedModel) -> None:
    """Bit for bit; the model has been run before, which is when compressed weights become plain ones."""
    source = model.checkpoint
    parameters = dict(loaded.named_parameters())
    num_checked = 0
    for name in source.names():
        rows = half_split_rows(source.config, name) if source.interleaved_rope else None
        matrix = model.matrix(name)
        if matrix is not None:
            expected = with_rows(matrix, rows).values()
        else:
            expected = model.values(name)
            if source.header(name).kind == "Q8_0":
                expected = expected.astype(np.float16).astype(np.float32)
            expected = expected if rows is None else expected[rows]
        found = parameters[huggingface_name(name)]
        assert found.dtype == torch.float32
        assert np.array_equal(found.detach().numpy(), expected), name
        num_checked += matrix is not None
    assert num_checked == 7 * source.config.num_layers
