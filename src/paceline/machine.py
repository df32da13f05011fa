"""What this machine lets the process use: threads, memory, instruction set; container limits included."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from paceline import _native
from paceline.config import Machine


def detect_machine(isa: str | None = None, *, root: Path = Path("/"), num_affine: int | None = None) -> Machine:
    """The machine as the process may use it.

    ``isa`` (else the variable PACELINE_ISA) overrides the best build that the processor runs. Threads: affinity and
    every cgroup quota on the way to the root, rounded down, at least 1. Memory: the kernel's estimate and what each
    cgroup limit leaves. ``root`` and ``num_affine`` replace the file system and the affinity in tests.
    """
    if num_affine is None:
        # os.sched_getaffinity is Linux only.
        num_affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [int(quota) for quota in _cpu_quotas(root)]
    available = [_kernel_available(root), *_memory_left(root)]
    return Machine(
        isa=isa or os.environ.get("PACELINE_ISA") or _native.best_isa(),
        num_threads=max(1, min([num_affine, *quotas])),
        available_bytes=max(0, min(available)),
    )


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel gives it, else as the operating system does."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _read(path: Path) -> str:
    """The text of a file, empty when it is not there or may not be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    """The whole number that a file holds, None for "max" or no file."""
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _kernel_available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, directory) of each cgroup of this process that limits ``controller``, innermost first.

    Inside a container the path in /proc/self/cgroup may belong to the host's tree; directories that do not exist are
    skipped and the walk ends at the mount, which is then the container's own.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":
            version, bases = 2, [mount, mount / "unified"]
        elif controller in names.split(","):
            version, bases = 1, [mount / names, mount / controller]
        else:
            continue
        base = next((base for base in bases if base.is_dir()), None)
        if base is None:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            directory = base.joinpath(*parts[:depth])
            if directory.is_dir():
                yield version, directory


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Processors that each cgroup grants."""
    for version, directory in _cgroups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(directory / "cpu.max").strip().partition(" ")
            if quota.isdigit() and period.isdigit() and int(period) > 0:
                yield int(quota) / int(period)
        else:
            limit, length = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
            if limit is not None and limit > 0 and length:
                yield limit / length


def _memory_left(root: Path) -> Iterator[int]:
    """Bytes that each cgroup's limit leaves; pages of files count as free, since the kernel drops them first."""
    for version, directory in _cgroups(root, "memory"):
        if version == 2:
            limit, used = _number(directory / "memory.max"), _number(directory / "memory.current")
            names = ("active_file", "inactive_file")
        else:
            limit, used = _number(directory / "memory.limit_in_bytes"), _number(directory / "memory.usage_in_bytes")
            names = ("total_active_file", "total_inactive_file")
        if limit is None:
            continue
        file_bytes = 0
        for line in _read(directory / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                file_bytes += int(value)
        yield limit - max(0, (used or 0) - file_bytes)
