"""Paceline: language models on your own processor, fast, and with the same answer on every path.

    from paceline import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of Korea is", SamplingParams(max_tokens=16)).text)

Names are loaded when first used, so that ``import paceline`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import EngineConfig as EngineConfig
    from paceline.config import Machine as Machine
    from paceline.config import ModelConfig as ModelConfig
    from paceline.engine.outputs import Completion as Completion
    from paceline.engine.outputs import Delta as Delta
    from paceline.engine.outputs import Timing as Timing
    from paceline.engine.outputs import TokenLogprob as TokenLogprob
    from paceline.engine.outputs import TopLogprob as TopLogprob
    from paceline.engine.stats import EngineStats as EngineStats
    from paceline.errors import AddressError as AddressError
    from paceline.errors import CacheDirectoryError as CacheDirectoryError
    from paceline.errors import CapacityError as CapacityError
    from paceline.errors import CheckpointError as CheckpointError
    from paceline.errors import ContextLengthError as ContextLengthError
    from paceline.errors import DownloadError as DownloadError
    from paceline.errors import EndpointError as EndpointError
    from paceline.errors import EngineStoppedError as EngineStoppedError
    from paceline.errors import KVCapacityError as KVCapacityError
    from paceline.errors import MemoryBudgetError as MemoryBudgetError
    from paceline.errors import ModelError as ModelError
    from paceline.errors import OutputError as OutputError
    from paceline.errors import OverloadError as OverloadError
    from paceline.errors import PacelineError as PacelineError
    from paceline.errors import ParameterError as ParameterError
    from paceline.errors import RequestError as RequestError
    from paceline.errors import RequestTimeoutError as RequestTimeoutError
    from paceline.errors import UnknownModelError as UnknownModelError
    from paceline.errors import UnsupportedError as UnsupportedError
    from paceline.llm import LLM as LLM
    from paceline.machine import detect_machine as detect_machine
    from paceline.params import SamplingParams as SamplingParams
    from paceline.params import Structure as Structure

__version__ = "0.1.0"

_MODULES = {
    "paceline.config": ("EngineConfig", "Machine", "ModelConfig"),
    "paceline.engine.outputs": ("Completion", "Delta", "Timing", "TokenLogprob", "TopLogprob"),
    "paceline.engine.stats": ("EngineStats",),
    "paceline.errors": (
        "AddressError",
        "CacheDirectoryError",
        "CapacityError",
        "CheckpointError",
        "ContextLengthError",
        "DownloadError",
        "EndpointError",
        "EngineStoppedError",
        "KVCapacityError",
        "MemoryBudgetError",
        "ModelError",
        "OutputError",
        "OverloadError",
        "PacelineError",
        "ParameterError",
        "RequestError",
        "RequestTimeoutError",
        "UnknownModelError",
        "UnsupportedError",
    ),
    "paceline.llm": ("LLM",),
    "paceline.machine": ("detect_machine",),
    "paceline.params": ("SamplingParams", "Structure"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604  # a test compares it with what can be imported


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
