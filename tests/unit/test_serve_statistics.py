"""The state of a server as its page and its readiness see it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from byte_llm import VOCAB, RecitingExecutor, byte_llm
from fake_executor import FakeTokenizer
from live_server import LIMIT_S, live_server

from paceline.engine.outputs import Completion, Delta, Timing
from paceline.executors.base import StepPlan, StepResult
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.exchange import Exchange
from paceline.serve.protocol.statistics import Statistics
from paceline.serve.recent import WINDOW_S, Recent
from paceline.serve.settings import ServeSettings


class GatedExecutor(RecitingExecutor):
    """Waits in each step until it may go on."""

    def __init__(self) -> None:
        super().__init__("hello", context_length=4096)
        self.gate = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(LIMIT_S)
        return super().run(plan)


def test_the_state_is_told() -> None:
    with live_server(byte_llm(text="hello\0")) as server:
        first = Statistics.model_validate(server.get("/stats").json())
        assert (first.running, first.waiting, first.kv_use, first.restarts) == (0, 0, 0.0, 0)
        assert first.ttft_s is first.tpot_s is first.prefix_hit_rate is first.tokens_per_s is None
        server.chat(max_tokens=4)
        server.chat(max_tokens=4)
        second = Statistics.model_validate(server.get("/stats").json())
        assert second.prefix_hit_rate is not None
        assert 0 < second.prefix_hit_rate < 1
        assert second.ttft_s is not None
        assert 0 < second.ttft_s.p50 <= second.ttft_s.p95
        assert second.read_gb_s is not None
        assert second.acceptance is None, "nobody drafts"
        assert second.path["isa"] == "fake"


def test_restarts_are_told() -> None:
    with live_server(byte_llm()) as server:
        supervisor = server.service._supervisor
        assert supervisor is not None
        supervisor.num_restarts = 2
        assert server.get("/stats").json()["restarts"] == 2


def test_without_a_model_there_is_no_state() -> None:
    with live_server(None) as server:
        assert server.get("/stats").status_code == 503
        ready = server.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading", "progress_age_s": None})


def test_a_step_that_hangs_makes_the_server_unready_and_not_dead() -> None:
    executor = GatedExecutor()
    table = [bytes([byte]) for byte in range(256)] + [b""]
    llm = LLM.from_parts(executor, FakeTokenizer(VOCAB, table=table))
    with live_server(llm, ServeSettings(max_stall_s=0.05)) as server:
        try:
            assert server.get("/health/ready").json() == {"status": "ready", "progress_age_s": 0.0}
            submission = llm.submit("x", SamplingParams(max_tokens=2), lambda update: None)
            deadline_s = time.monotonic() + LIMIT_S
            while (ready := server.get("/health/ready")).status_code == 200 and time.monotonic() < deadline_s:
                pass
            assert (ready.status_code, ready.json()["status"]) == (503, "stalled")
            assert ready.json()["progress_age_s"] > 0.05
            assert server.get("/health/live").status_code == 200
            assert server.get("/health").status_code == 503, "as Text Generation Inference is asked"
            submission.abort()
        finally:
            executor.gate.set()
        while (ready := server.get("/health/ready")).status_code != 200 and time.monotonic() < deadline_s:
            pass
        assert ready.json()["status"] == "ready"


def test_windows_end_after_a_minute() -> None:
    now = [1000.0]
    recent = Recent(lambda: now[0])
    exchange = Exchange()
    exchange.asked(1, SamplingParams(), streaming=False, asked_s=exchange.started_s)
    exchange.heard([Delta("", [1, 2], "stop", 0, Completion("", [1, 2], "stop", 1, timing=Timing(0.5, 0.25)))])
    recent.ended(exchange)
    assert recent.tpot_s() == [0.25]
    assert recent.ttft_s() == [pytest.approx(0.5, abs=1.0)]
    now[0] += WINDOW_S + 1
    assert recent.ttft_s() == recent.tpot_s() == []


def test_rates_compare_with_earlier_looks() -> None:
    now = [0.0]
    recent = Recent(lambda: now[0])
    with byte_llm() as llm:
        zero = llm.stats()
    now[0] = 10.0
    assert recent.look(zero) == (10.0, None)
    assert recent.tokens_per_s(zero) is None
    later = dataclasses.replace(zero, output_tokens=60)
    now[0] = 12.0
    assert recent.tokens_per_s(later) == 30.0
    assert recent.look(later) == (2.0, zero)
    now[0] = 12.1
    assert recent.look(later) == (pytest.approx(2.1), zero), "looks too close together are not kept"
    now[0] = 71.0
    assert recent.tokens_per_s(later) is None
    assert recent.look(later) == (59.0, later), "the one at 10 s has left the window"
