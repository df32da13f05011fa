"""What ``import paceline`` offers, and what it must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline


def test_every_exported_name_exists() -> None:
    assert paceline.__all__ == sorted(paceline.__all__, key=lambda name: (name != "__version__", name))
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(dir(paceline)) == set(paceline.__all__)


def test_every_error_is_exported() -> None:
    from paceline import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(paceline.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="Llama"):
        paceline.Llama  # noqa: B018


def test_importing_loads_nothing_and_the_engine_loads_no_file_format() -> None:
    code = (
        "import sys, paceline\n"
        "heavy = 'numpy asyncio tokenizers gguf safetensors jinja2 torch transformers huggingface_hub'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "paceline.LLM\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == ["[]", "['numpy']"]
