"""The tensors that a configuration needs, and the check that a file has these and no others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.config import ModelConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.registry import build_graph

Shape = tuple[int, ...]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor of such a model: what its graph reads."""
    return {name: spec.shape for name, spec in build_graph(config).weights.items()}


def check_layers(path: Path, config: ModelConfig, num_tensors: int) -> None:
    """Raises CheckpointError for more layers than a file with so many tensors can have. Before ``expected_shapes``: its
    answer grows with the layers, whatever a damaged configuration says.
    """
    if config.num_layers > num_tensors:
        raise CheckpointError(path, f"says it has {config.num_layers} layers but holds only {num_tensors} tensors")


def rows_of_parts(
    path: Path, name: str, num_rows: int, fused: Mapping[str, tuple[str, ...]], expected: Mapping[str, Shape]
) -> dict[str, range]:
    """Which tensors a tensor of ``num_rows`` rows is, with the rows of each: several where it is one of ``fused``
    (``Family.fused``), else it is itself.

    ``expected`` are the shapes that the model needs. Raises CheckpointError for another number of rows than the parts
    have together.
    """
    block, layer, module, parameter = name.split(".") if name.count(".") == 3 else ("", "", "", "")
    if module not in fused or (name in expected and expected[name][0] == num_rows):
        return {name: range(num_rows)}
    parts, end = {}, 0
    for part in (".".join((block, layer, each, parameter)) for each in fused[module]):
        if part not in expected:
            return {name: range(num_rows)}
        parts[part] = range(end, end + expected[part][0])
        end = parts[part].stop
    if end != num_rows:
        raise CheckpointError(path, f"has {num_rows} rows, expected {end}: {', '.join(parts)}", tensor=name)
    return parts


def check_inventory(path: Path, config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError for a tensor that is missing or has another shape, UnsupportedError for one left over.

    A tensor that nothing reads (a bias, a scale, an expert) would have changed the result: it is not passed over.
    """
    check_layers(path, config, len(shapes))
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointError(path, "missing", tensor=name)
        if shapes[name] != shape:
            raise CheckpointError(path, f"has shape {shapes[name]}, expected {shape}", tensor=name)
    for name in shapes:
        if name not in expected:
            raise UnsupportedError(f"{path}: tensor {name!r} has no place in the {config.architecture} architecture")
