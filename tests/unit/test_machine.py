"""Threads, memory and instruction set from made-up file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import _native
from paceline.machine import detect_machine

GB = 10**9


def make_root(tmp_path: Path, files: dict[str, str], *, cgroup: str = "0::/\n") -> Path:
    """A file system with 16 GB available."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {16 * GB // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_without_limits_the_kernel_and_the_affinity_decide(tmp_path: Path) -> None:
    machine = detect_machine(root=make_root(tmp_path, {}), num_affine=6)
    assert (machine.num_threads, machine.available_bytes) == (6, 16 * GB)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 6),
        ("250000 100000", 2),
        ("200000 100000", 2),
        ("199999 100000", 1),
        ("50000 100000", 1),
        ("900000 100000", 6),
    ],
)
def test_a_v2_quota_is_rounded_down(tmp_path: Path, quota: str, threads: int) -> None:
    root = make_root(tmp_path, {"sys/fs/cgroup/cpu.max": quota + "\n"})
    assert detect_machine(root=root, num_affine=6).num_threads == threads


def test_the_tightest_v2_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        {
            "sys/fs/cgroup/a/memory.max": str(4 * GB),
            "sys/fs/cgroup/a/memory.current": str(3 * GB),
            "sys/fs/cgroup/a/memory.stat": f"anon 5\nactive_file {GB}\ninactive_file {GB // 2}\nslab 7\n",
            "sys/fs/cgroup/a/cpu.max": "300000 100000",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": str(GB),
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        },
        cgroup="0::/a/b\n",
    )
    machine = detect_machine(root=root, num_affine=8)
    assert machine.available_bytes == 4 * GB - (3 * GB - 3 * GB // 2)
    assert machine.num_threads == 3


def test_a_path_of_the_host_falls_back_to_the_containers_mount(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        {"sys/fs/cgroup/memory.max": str(GB), "sys/fs/cgroup/memory.current": "0"},
        cgroup="0::/../../docker/abc\n",
    )
    assert detect_machine(root=root).available_bytes == GB


def test_v1_limits(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        {
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GB),
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GB // 4}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GB),
        },
        cgroup="4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/box\n",
    )
    machine = detect_machine(root=root, num_affine=8)
    assert machine.num_threads == 2
    assert machine.available_bytes == GB + GB // 4


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path, {"sys/fs/cgroup/memory.max": "5", "sys/fs/cgroup/memory.current": "9"})
    assert detect_machine(root=root).available_bytes == 0


def test_a_wish_beats_the_variable_which_beats_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(tmp_path, {})
    monkeypatch.delenv("PACELINE_ISA", raising=False)
    assert detect_machine(root=root).isa == _native.best_isa()
    monkeypatch.setenv("PACELINE_ISA", "avx2")
    assert detect_machine(root=root).isa == "avx2"
    assert detect_machine("scalar", root=root).isa == "scalar"


def test_this_machine() -> None:
    machine = detect_machine()
    assert machine.num_threads >= 1
    assert machine.available_bytes > 0
