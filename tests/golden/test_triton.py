"""The tests of Triton's kernels, in its interpreter: a process for each file, since TRITON_INTERPRET is a process's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[1] / "triton"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels(name: str) -> None:
    """Every test of the file passes; none is left out."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_"))}
    environment["OMP_NUM_THREADS"] = "1"
    if name != "test_compiled.py":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "600", "-p", "no:cacheprovider", FOLDER / name]
    found = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    summary = found.stdout.strip().splitlines()[-1]
    assert "passed" in summary, summary
    assert "skipped" not in summary, summary
