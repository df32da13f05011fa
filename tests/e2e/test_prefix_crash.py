"""An engine that is killed while it keeps its prefix cache on disk: the next one starts with what was written, and
answers as if there were no cache."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from fake_executor import FakeTokenizer
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.executors.native import NativeExecutor
from paceline.kv.identity import store_key
from paceline.kv.layout import KVLayout
from paceline.kv.store import PageStore
from paceline.params import SamplingParams

MODEL = tiny_config()

SERVER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_prefix_crash import engine_over, open_store, prompts, serve
store = open_store(Path(sys.argv[3]))
engine = engine_over(store)
for seed in range(10**6):
    for prompt in prompts(seed):
        serve(engine, prompt)
        while engine.persist():
            print(len(store), flush=True)
"""


def open_store(directory: Path) -> PageStore:
    """The store of the tiny model."""
    key = store_key(MODEL, EngineConfig(), model_hash=bytes(32), executor="native")
    return PageStore.open(directory, key, page_bytes=KVLayout.of(MODEL, "f16").page_bytes, max_bytes=2**26)


def engine_over(store: PageStore | None) -> Engine:
    """An engine with room for 64 pages."""
    config = EngineConfig(max_batch=2, token_budget=64, kv_memory_bytes=64 * KVLayout.of(MODEL, "f16").page_bytes)
    return Engine(
        NativeExecutor.load(tiny_checkpoint(MODEL), config), FakeTokenizer(MODEL.vocab_size), config, store=store
    )


def prompts(seed: int = 0) -> list[list[int]]:
    """Thirty prompts of some 300 tokens, in three families that begin alike, whatever the seed."""
    trunks = [np.random.default_rng(trunk).integers(0, 74, 200).tolist() for trunk in range(3)]
    rng = np.random.default_rng(seed)
    return [trunks[at % 3] + rng.integers(0, 74, int(rng.integers(40, 120))).tolist() for at in range(30)]


def serve(engine: Engine, prompt: list[int]) -> Request:
    """The request, answered."""
    request = engine.make_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request


def test_a_killed_engine_leaves_a_cache_that_is_right(tmp_path: Path) -> None:
    plain = engine_over(None)
    expected = [serve(plain, prompt).tokens for prompt in prompts()]
    here = Path(__file__).parent
    for num_lines in (3, 40, 150):
        command = [sys.executable, "-c", SERVER, str(here), str(here.parent / "unit"), str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            for _ in range(num_lines):
                num_written = int(server.stdout.readline())
            server.send_signal(signal.SIGKILL)
        assert server.returncode == -signal.SIGKILL, "it ended by itself"
        store = open_store(tmp_path)
        assert len(store) >= num_written
        engine = engine_over(store)
        answers = [serve(engine, prompt) for prompt in prompts()]
        assert [request.tokens for request in answers] == expected
        assert answers[0].num_cached >= 64, "nothing came from the disk"
        assert store.num_corrupt == 0
        store.close()
