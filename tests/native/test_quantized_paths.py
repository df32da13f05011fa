"""`paceline verify` over quantised directories: every path through the engine gives the bits of the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_files import file_config, write_directory_model
from rounded_models import RoundedModel

from paceline.config import EngineConfig
from paceline.executors.base import Executor
from paceline.llm import LLM
from paceline.measure.cells import Host
from paceline.measure.verification import Effort, verify
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.weights.checkpoint import open_checkpoint

CASES = {
    "gptq with an order of inputs": ("gptq", Scheme("rtn", 4, 32)),
    "asymmetric groups of 64": ("compressed-tensors", Scheme("rtn", 4, 64)),
    "W8A8": ("compressed-tensors", Scheme("smoothquant", 8, None, True)),
    "own format with an order of inputs": ("paceline", Scheme("rtn", 8, 128)),
}
SOURCES = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_up": "ffn_gate"}
"""Whose order a matrix has that reads the same input."""


@pytest.mark.parametrize("case", CASES)
def test_every_path_has_the_bits_of_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))  # what steps cost is kept there
    fmt, scheme = CASES[case]
    source = open_checkpoint(write_directory_model(tmp_path / "source", file_config(tie_embeddings=False), "F16"))
    model = RoundedModel(source, scheme)
    if "order" in case:
        for name in source.names():
            layer, _, module = name.removesuffix(".weight").rpartition(".")
            if layer and len(shape := source.header(name).shape) == 2:
                seed = list((SOURCES.get(module, module) + layer).encode())
                groups = np.random.default_rng(seed).permutation(np.arange(shape[1]) // (scheme.group or 1))
                model.orders[name] = np.argsort(groups, kind="stable").astype(np.int32)
    write_model(model, tmp_path / "m", fmt)

    def load(config: EngineConfig, wrap: Callable[[Executor], Executor]) -> LLM:
        return LLM(str(tmp_path / "m"), config=config, wrap=wrap)

    config = EngineConfig(num_threads=1, kv_memory_bytes=2**22)
    host = replace(Host.of(config), num_threads=2, kv_formats=("int8",))
    effort = Effort(num_long=140, num_text=40, num_new=4)
    proof = verify(load, config, host, full=False, effort=effort)
    assert len(proof.results) > 40
    assert [result for result in proof.results if result.verdict == "FAIL"] == []
