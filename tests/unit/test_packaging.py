"""The package: what a wheel would hold, what importing it costs, and that its papers agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/paceline"
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installed_package_is_the_source() -> None:
    installed = Path(paceline.__file__).parent
    wanted = {path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")}
    assert wanted, SOURCE
    assert {path.relative_to(installed) for path in installed.rglob("*.py")} == wanted
    stale = [str(name) for name in wanted if (installed / name).read_bytes() != (SOURCE / name).read_bytes()]
    assert stale == [], "run `make install`"


def test_distribution_says_what_the_source_says() -> None:
    try:
        installed = distribution("paceline")
    except PackageNotFoundError:
        assert Path(paceline.__file__).parent == SOURCE, "neither installed nor run from the source"
        return
    assert installed.version == paceline.__version__
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert {point.name: point.value for point in installed.entry_points} == {"paceline": "paceline.cli.main:main"}


def test_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text) > 11_000


def test_changelog_names_the_version_or_has_it_coming() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{paceline.__version__}]" in changelog


def test_core_imports_no_heavy_package() -> None:
    code = "import sys, paceline, paceline.llm; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(python(code).split())
    assert not loaded & {"torch", "transformers", "huggingface_hub", "ray", "starlette", "pydantic"}


def test_help_needs_neither_numpy_nor_the_engine() -> None:
    loaded = set(python("import sys, paceline.cli.main as m; m.build_parser(); print(*sys.modules)").split())
    assert not loaded & {"numpy", "tokenizers", "gguf", "paceline.llm", "paceline.engine.engine"}


def test_environment_variables_are_listed_and_few() -> None:
    files = [*SOURCE.rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    code = "\n".join(path.read_text() for path in files)
    read = set(re.findall(r"""(?:environ\.get\(|environ\[|getenv\()\s*["'](PACELINE_\w+)""", code))
    listed = set(re.findall(r"^\| `(PACELINE_\w+)`", (ROOT / "docs/env.md").read_text(), re.MULTILINE))
    assert read == listed
    assert len(listed) <= 8


@pytest.mark.parametrize("extra", ["torch", "train", "serve", "eval", "otel", "ray", "test", "dev"])
def test_extra_exists(extra: str) -> None:
    assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE)


@pytest.mark.parametrize("group", ["runtime", "build", "dev", "test"])
def test_requirements_printer_prints_what_pyproject_says(group: str) -> None:
    done = subprocess.run(
        [sys.executable, ".ci/requirements.py", group], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines
    assert all(f'"{line}"' in PYPROJECT for line in lines)
