"""Where kernels run: in Triton's interpreter with TRITON_INTERPRET=1, compiled where there is a GPU, else not at all.

The variable must be set before triton is imported, and holds for the whole process: ``tests/golden/test_triton.py``
starts one for each file of this folder. ``make test-gpu`` runs them compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    import tensor_cores

    tensor_cores.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside the interpreter what has the fixture ``device`` needs a GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu" if not IS_INTERPRETED else "interpreted")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that kernels run on."""
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
