"""A process that is killed while it writes pages leaves a store whose every page is right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stored_pages import open_store, put_path, right_pages

WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stored_pages import open_store, put_path
store = open_store(Path(sys.argv[2]), max_bytes=int(sys.argv[3]))
rng = random.Random(int(sys.argv[4]))
print("ready", flush=True)
while True:
    put_path(store, *(rng.randrange(6) for _ in range(rng.randrange(1, 5))))
    print(len(store), flush=True)
"""


@pytest.mark.parametrize("max_bytes", [30_000, 2**20], ids=["evicting", "growing"])
def test_a_killed_writer_loses_no_page_but_the_newest(tmp_path: Path, max_bytes: int) -> None:
    rng = random.Random(max_bytes)
    num_before = 0
    for attempt in range(4):
        tool_directory = str(Path(__file__).parents[1] / "unit")
        command = [sys.executable, "-c", WRITER, tool_directory, str(tmp_path), str(max_bytes), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            num_written = num_before
            for _ in range(rng.randrange(1, 300)):
                num_written = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL, "it ended by itself"
        store = open_store(tmp_path, max_bytes=max_bytes)
        num_entries = len(store)
        assert len(right_pages(store)) == num_entries, "a page was damaged"
        assert store.num_corrupt == 0
        # One eviction may be under way; without evictions nothing that was reported is missing.
        assert num_entries >= num_written - (1 if max_bytes < 2**20 else 0)
        assert put_path(store, 100 + attempt) != [None]
        num_before = len(store)
        store.close()
    assert num_before > 15
