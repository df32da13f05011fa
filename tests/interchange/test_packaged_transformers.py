"""The packaged model, quantised, in Transformers: what tests/golden/test_export_transformers.py does with tiny ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounded_models import RoundedModel
from tokenizer_files import TEXTS
from transformers import AutoTokenizer
from transformers_models import check_weights, greedy, load

from paceline import LLM, SamplingParams
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.catalog import resolve_model
from paceline.weights.checkpoint import open_checkpoint

NEW_TOKENS = 12


@pytest.mark.timeout(600)
def test_the_packaged_model(tmp_path: Path) -> None:
    source = open_checkpoint(resolve_model("smollm2-135m", download=False))
    model = RoundedModel(source, Scheme("rtn", 4, 64))
    write_model(model, tmp_path / "m", "compressed-tensors")
    ours, theirs = load_tokenizer(source), AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    loaded = load(tmp_path / "m")
    ids = ours.encode("The capital of France is")
    tokens = greedy(loaded, ids, NEW_TOKENS)
    check_weights(loaded, model)
    llm = LLM(str(tmp_path / "m"), weights="f32", speculate="off")
    answer = llm.generate([ids], SamplingParams(max_tokens=NEW_TOKENS, temperature=0))[0]
    assert list(answer.token_ids) == tokens
