"""Compiles what a function would launch, for a GPU that need not be there.

Triton brings NVIDIA's assembler, so a machine without a GPU gets as far as the machine code.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments and options that it was given."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compile(self, arch: int, folder: Path) -> Compiled:
        """The machine code for compute capability ``arch`` (90: 9.0), specialised as Triton's launcher does."""
        signature, constants, attributes = {}, {}, {}
        for index, (name, value) in enumerate(self.arguments.items()):
            is_constant = self.kernel.params[index].is_constexpr or (type(value) is int and value == 1)
            signature[name] = "constexpr" if is_constant else mangle_type(value)
            if is_constant:
                constants[name] = value
            elif isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=self.options)
        file = folder / f"{self.kernel.__name__}-{arch}.cubin"
        file.write_bytes(code.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True)
        assembly = subprocess.run([TOOLS / "nvdisasm", "-c", file], capture_output=True, text=True, check=True).stdout
        numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage.stdout)}
        return Compiled(numbers["REG"], numbers["STACK"], code.metadata.shared, assembly)


@dataclass(frozen=True)
class Compiled:
    """Registers and bytes of stack of a thread, bytes of shared memory of a program, and the assembly."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    assembly: str


def record(monkeypatch: pytest.MonkeyPatch, *kernels: Any) -> list[Launch]:
    """A list to which what these kernels would be launched with is appended; nothing is launched any more."""
    launches: list[Launch] = []

    def recorder(kernel: Any) -> Any:
        def run(*arguments: Any, grid: object, warmup: bool, **named: Any) -> None:
            given = {name: named.pop(name) for name in kernel.arg_names if name in named}
            bound = dict(zip(kernel.arg_names, arguments, strict=False)) | given
            assert list(bound) == kernel.arg_names, "arguments stand in order"
            launches.append(Launch(kernel, bound, named))

        return run

    for kernel in kernels:
        monkeypatch.setattr(kernel, "run", recorder(kernel))
    return launches
