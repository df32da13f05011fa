"""Makes the test tools that tests share importable by name, and skips what needs a GPU where there is none."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

for folder in ("unit", "e2e", "triton"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


@cache
def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests with the marker ``gpu``, before their fixtures, where there is no GPU."""
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("no CUDA device")
