"""What the engine computes from a file is what it computes from the matrices that it was made from, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_files import file_config, write_directory_model, write_gguf_model
from rounded_models import RoundedModel
from tiny_models import MemoryCheckpoint
from token_sequences import engine_config, random_sequences, run_chunks

from paceline.executors.native import NativeExecutor
from paceline.executors.weights import WeightLoader
from paceline.models.registry import build_graph
from paceline.quantize.export.write import write_model
from paceline.quantize.scheme import Scheme
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.raw import Checkpoint, RawTensor

CASES = [
    ("compressed-tensors", Scheme("rtn", 4, 64)),
    ("compressed-tensors", Scheme("rtn", 8, 32, True)),
    ("compressed-tensors", Scheme("rtn", 3, 128)),
    ("compressed-tensors", Scheme("smoothquant", 8, None, True)),
    ("gptq", Scheme("rtn", 4, 64)),
    ("gptq", Scheme("rtn", 3, 32, True)),
    ("gptq", Scheme("rtn", 8, None)),
    ("awq", Scheme("rtn", 4, 128)),
    ("gguf", Scheme("rtn", 4, 32, True)),
    ("gguf", Scheme("rtn", 8, 32, True)),
    ("paceline", Scheme("rtn", 4, None)),
    ("paceline", Scheme("rtn", 8, 128)),
    ("paceline", Scheme("smoothquant", 8, None, True)),
]


@pytest.fixture(scope="module", params=["llama.gguf", "qwen2.gguf", "llama"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Models whose embeddings every format keeps to the bit."""
    folder = tmp_path_factory.mktemp("models")
    if request.param == "llama":
        config = file_config(tie_embeddings=False)
        return open_checkpoint(write_directory_model(folder / "llama", config, "F16"))
    changes = {"architecture": "qwen2", "attention_bias": True} if "qwen2" in request.param else {}
    return open_checkpoint(write_gguf_model(folder / request.param, file_config(**changes)))


def in_memory(model: RoundedModel, written: Checkpoint) -> MemoryCheckpoint:
    """The matrices as blocks and all else as floats; embeddings and head as the file has them, whose types formats
    choose.
    """
    tensors = {}
    for name in model.checkpoint.names():
        matrix = model.matrix(name)
        if matrix is not None:
            tensors[name] = matrix.blocks(name)
        elif name in ("token_embd.weight", "output.weight"):
            tensors[name] = written.tensor(name)
        else:
            values = model.values(name)
            tensors[name] = RawTensor(name, values.shape, "F32", values.reshape(-1).view(np.uint8))
    return MemoryCheckpoint(model.checkpoint.config, tensors, model.checkpoint.interleaved_rope)


@pytest.mark.parametrize(("fmt", "scheme"), CASES, ids=str)
def test_the_same_bits_as_from_memory(source: Checkpoint, tmp_path: Path, fmt: str, scheme: Scheme) -> None:
    model = RoundedModel(source, scheme)
    if fmt == "gptq" and scheme.group is not None:
        num_inputs = source.config.hidden_size
        groups = np.random.default_rng(2).permutation(np.arange(num_inputs) // scheme.group)
        model.orders["blk.0.ffn_up.weight"] = np.argsort(groups, kind="stable").astype(np.int32)
    write_model(model, tmp_path / "m", fmt)
    written = open_checkpoint(tmp_path / "m")
    expected = in_memory(model, written)
    graph = build_graph(written.config)
    config = engine_config(written.config, num_pages=4)
    loaders = [WeightLoader(checkpoint, graph, config, num_threads=1) for checkpoint in (expected, written)]
    for spec in graph.weights.values():
        if len(spec.shape) == 1:
            assert np.array_equal(*(loader.vector(spec.name) for loader in loaders)), spec.name
            continue
        (ours,), (theirs,) = (loader.matrices([spec.name]) for loader in loaders)
        assert ours.format == theirs.format
        assert np.array_equal(ours.data, theirs.data), spec.name
        assert (ours.order is None) == (theirs.order is None)
        assert ours.order is None or np.array_equal(ours.order, theirs.order)
    (sequence,) = random_sequences([40], written.config.vocab_size)
    exact = engine_config(written.config, num_pages=4, weights="f32")
    logits = [run_chunks(NativeExecutor.load(checkpoint, exact), sequence, 16) for checkpoint in (expected, written)]
    assert np.array_equal(*logits)
    assert np.ptp(logits[0]) > 0.1
