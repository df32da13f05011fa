"""LLM over a fake executor: what callers see, from one thread or many."""

from __future__ import annotations

import dataclasses
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fake_executor import FakeExecutor, FakeTokenizer, reference_tokens, tiny_model

from paceline.config import EngineConfig
from paceline.engine.detokenize import TokenText
from paceline.engine.engine import Engine
from paceline.engine.request import choice_seed
from paceline.errors import (
    ContextLengthError,
    EngineStoppedError,
    KVCapacityError,
    OverloadError,
    PacelineError,
    ParameterError,
    UnsupportedError,
)
from paceline.executors.base import StepPlan, StepResult
from paceline.llm import LLM
from paceline.params import SamplingParams

FREE = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)


class GatedExecutor(FakeExecutor):
    """Waits before each step until it may go on; ``entered`` tells that a step waits."""

    def __init__(self, **options: int) -> None:
        super().__init__(model=tiny_model(context_length=100_000), num_pages=4000, **options)
        self.entered = threading.Event()
        self.gate = threading.Semaphore(0)
        self.open = False

    def run(self, plan: StepPlan) -> StepResult:
        if not self.open:
            self.entered.set()
            assert self.gate.acquire(timeout=60)
        return super().run(plan)

    def let_go(self) -> None:
        self.open = True
        self.gate.release()


def wait_until(condition: Callable[[], bool]) -> None:
    """Yields to other threads until the condition holds; a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came true"
        threading.Event().wait(0.001)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.from_parts(FakeExecutor(), FakeTokenizer()) as llm:
        yield llm


@pytest.fixture
def gated() -> Iterator[tuple[LLM, GatedExecutor]]:
    executor = GatedExecutor()
    llm = LLM.from_parts(executor, FakeTokenizer(), config=EngineConfig(max_batch=4))
    yield llm, executor
    executor.let_go()
    llm.close()


def test_one_prompt_gives_one_completion(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("hello")
    by_text, by_ids = llm.generate("hello", FREE), llm.generate(tokens, FREE)
    assert by_text.token_ids == by_ids.token_ids == reference_tokens(tokens, 20)
    assert by_text.choices == ()


def test_a_list_gives_a_list(llm: LLM) -> None:
    prompts = ["one", [1, 2, 3], "three"]
    completions = llm.generate(prompts, FREE)
    assert [c.token_ids for c in completions] == [llm.generate(prompt, FREE).token_ids for prompt in prompts]
    assert llm.generate([]) == []
    assert [c.num_prompt_tokens for c in llm.generate(["abc"], FREE)] == [3]


def test_a_list_runs_as_one_batch() -> None:
    executor = FakeExecutor()
    with LLM.from_parts(executor, FakeTokenizer()) as llm:
        llm.generate([[token] for token in range(1, 9)], FREE)
    assert executor.log[0] == (8, 8, 8)
    assert len(executor.log) == 20


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 5)]
    assert [c.num_completion_tokens for c in llm.generate(["a", "b"], params)] == [3, 5]
    with pytest.raises(ParameterError, match="params"):
        llm.generate(["a", "b", "c"], params)


def test_choices(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3, ignore_eos=True)
    completion = llm.generate("abc", params)
    assert len(completion.choices) == 3
    assert completion.token_ids == completion.choices[0].token_ids
    assert len({tuple(choice.token_ids) for choice in completion.choices}) == 3
    for choice, expected in enumerate(completion.choices):
        single = SamplingParams(max_tokens=12, temperature=1.0, seed=choice_seed(5, choice), ignore_eos=True)
        assert llm.generate("abc", single).token_ids == expected.token_ids


def test_choices_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=4, ignore_eos=True)
    first, second = llm.generate(["abc", "abc"], params)
    assert len({tuple(choice.token_ids) for choice in first.choices + second.choices}) == 8


def test_stream_pieces_join_to_what_generate_gives(llm: LLM) -> None:
    expected = llm.generate("hello", FREE)
    deltas = list(llm.stream("hello", FREE))
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert deltas[-1].completion is not None
    assert deltas[-1].completion.token_ids == expected.token_ids
    assert deltas[-1].finish_reason == "length"
    assert all(delta.completion is None for delta in deltas[:-1])


def test_stream_of_choices(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, ignore_eos=True)
    deltas = list(llm.stream("abc", params))
    for index, choice in enumerate(llm.generate("abc", params).choices):
        assert "".join(delta.text for delta in deltas if delta.index == index) == choice.text


def test_a_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_chat_renders_and_adds_no_special_tokens() -> None:
    class Template:
        def render(self, messages: object, add_generation_prompt: bool = True) -> str:
            assert add_generation_prompt
            return "rendered"

    class Strict(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return super().encode(text)

    with LLM.from_parts(FakeExecutor(), Strict(), chat_template=Template()) as llm:
        messages = [{"role": "user", "content": "hi"}]
        completion = llm.chat(messages, FREE)
        assert completion.token_ids == reference_tokens(FakeTokenizer().encode("rendered"), 20)
        assert "".join(delta.text for delta in llm.chat(messages, FREE, stream=True)) == completion.text


def test_impossible_prompts_raise_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", [1] * 1000], FREE)
    with pytest.raises(ParameterError):
        llm.stream([1, 2, 1000])
    for wrong in ([1.5], [None], [["text"]]):
        with pytest.raises(ParameterError, match="token ids"):
            llm.generate(wrong)  # type: ignore[call-overload]
    assert llm.stats().steps == 0


def test_an_error_is_raised_alone_and_reported_in_a_list() -> None:
    with LLM.from_parts(FakeExecutor(num_pages=2), FakeTokenizer()) as llm:
        with pytest.raises(KVCapacityError, match=r"65 tokens.*64"):
            llm.generate("x", ENDLESS)
        with pytest.raises(KVCapacityError):
            list(llm.stream("x", ENDLESS))
        good, bad = llm.generate(["y", "x"], [FREE, ENDLESS])
        assert good.finish_reason == "length"
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, KVCapacityError)
        assert bad.num_completion_tokens == 64
        assert llm.stats().pages_used == 0


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_a_stream_that_is_left_stops_the_work(gated: tuple[LLM, GatedExecutor], how: str) -> None:
    llm, executor = gated
    executor.let_go()
    stream = llm.stream("abc", ENDLESS)
    next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    del stream
    gc.collect()
    wait_until(lambda: llm.stats().num_running == 0 and llm.stats().requests_finished == 1)
    assert llm.stats().pages_used == 0
    assert llm.generate("abc", FREE).num_completion_tokens == 20


def test_calls_from_threads_share_the_batch(gated: tuple[LLM, GatedExecutor]) -> None:
    llm, executor = gated
    answers: dict[int, list[int]] = {}

    def ask(token: int) -> None:
        answers[token] = llm.generate([token], FREE).token_ids

    threads = [threading.Thread(target=ask, args=(token,)) for token in range(1, 5)]
    threads[0].start()
    assert executor.entered.wait(60)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: llm._runner._commands.qsize() == 3)
    executor.let_go()
    for thread in threads:
        thread.join(60)
    assert answers == {token: reference_tokens([token], 20) for token in range(1, 5)}
    assert max(sequences for _, sequences, _ in executor.log) == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_an_interrupt_aborts_and_leaves_the_llm_usable(
    gated: tuple[LLM, GatedExecutor], streaming: bool, request: pytest.FixtureRequest
) -> None:
    llm, executor = gated
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # A shell that runs the tests in the background has them ignore interrupts.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        assert executor.entered.wait(60)
        signal.pthread_kill(main_thread, signal.SIGINT)

    def ask() -> None:
        if streaming:
            list(llm.stream("abc", ENDLESS))
        else:
            llm.generate(["abc", "def"], ENDLESS)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ask()
    thread.join(60)
    executor.let_go()
    wait_until(lambda: llm.stats().num_running == 0)
    assert llm.generate("abc", FREE).token_ids == reference_tokens(llm.tokenizer.encode("abc"), 20)


def test_close_ends_those_who_wait(gated: tuple[LLM, GatedExecutor]) -> None:
    llm, executor = gated
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(llm.generate("abc", ENDLESS).finish_reason))
    thread.start()
    assert executor.entered.wait(60)
    closing = threading.Thread(target=llm.close)
    closing.start()
    wait_until(lambda: llm._runner._closed)
    executor.let_go()
    thread.join(60)
    closing.join(60)
    assert reasons == ["abort"]
    llm.close()
    with pytest.raises(PacelineError, match="closed"):
        llm.generate("abc")
    with pytest.raises(PacelineError, match="closed"):
        llm.stream("abc")


def test_a_dropped_llm_ends_its_thread() -> None:
    llm = LLM.from_parts(FakeExecutor(), FakeTokenizer())
    llm.generate("abc", FREE)
    thread = llm._runner._thread
    assert thread is not None
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_no_thread_before_the_first_request() -> None:
    before = threading.active_count()
    with LLM.from_parts(FakeExecutor(), FakeTokenizer()) as llm:
        assert threading.active_count() == before
        llm.generate("abc", FREE)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_bug_in_the_engine_reaches_those_who_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(Engine, "step", broken)
    for _ in range(2):
        with pytest.raises(EngineStoppedError, match="a bug") as caught:
            llm.generate("abc")
        assert isinstance(caught.value.__cause__, AssertionError)


def test_options_by_name() -> None:
    llm = LLM.from_parts(FakeExecutor(), FakeTokenizer(), config=EngineConfig(max_batch=2))
    assert llm.config.max_batch == 2
    assert llm.config.context_length == 512
    assert None not in (llm.config.num_threads, llm.config.isa)
    with pytest.raises(ParameterError, match=r"num_thread='?2'?.*num_threads"):
        LLM("no-such-model", num_thread=2)
    with pytest.raises(ParameterError, match="max_batch"):
        LLM("no-such-model", max_batch=0)
    with pytest.raises(ParameterError, match="executor"):
        LLM("no-such-model", executor="magic")  # type: ignore[arg-type]


def test_what_an_llm_tells(llm: LLM) -> None:
    llm.generate("abc", FREE)
    stats = llm.stats()
    assert stats.output_tokens == 20
    assert 0 < stats.python_share < 1
    assert llm.path()["isa"] == "fake"
    assert "tokens that fit" in llm.memory_table()
    assert llm.memory.num_pages == 64
    with pytest.raises(AttributeError):
        stats.steps = 1  # type: ignore[misc]


def test_the_tokenizer_protocol_is_what_the_engine_uses() -> None:
    tokenizer: TokenText = FakeTokenizer()
    assert tokenizer.vocab_size == 97


def test_a_stream_keeps_the_llm_that_nobody_else_holds(gated: tuple[LLM, GatedExecutor]) -> None:
    llm, executor = gated
    executor.let_go()
    expected = llm.generate("abc", FREE).text
    stream = llm.stream("abc", FREE)
    assert stream._owner is llm
    assert "".join(delta.text for delta in stream) == expected
    assert stream._owner is None, "and lets it go at the end"


def test_closing_a_stream_ends_the_thread_that_waits_for_it(gated: tuple[LLM, GatedExecutor]) -> None:
    llm, executor = gated
    stream = llm.stream("abc", ENDLESS)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    assert executor.entered.wait(60)
    stream.close()
    executor.let_go()
    reader.join(60)
    assert not reader.is_alive()


@pytest.mark.parametrize("prompts", [b"abc", {"a": 1}, 5, None])
def test_prompts_that_are_none_are_refused(gated: tuple[LLM, GatedExecutor], prompts: object) -> None:
    llm, _ = gated
    with pytest.raises(ParameterError, match="prompts"):
        llm.generate(prompts)  # type: ignore[call-overload]


def test_parameters_of_another_kind_are_refused(gated: tuple[LLM, GatedExecutor]) -> None:
    llm, _ = gated
    with pytest.raises(ParameterError, match="SamplingParams"):
        llm.stream("a", {"max_tokens": 1})  # type: ignore[arg-type]


def test_the_queue_limit_counts_those_who_wait_behind_a_full_batch(gated: tuple[LLM, GatedExecutor]) -> None:
    llm, executor = gated
    engine = llm._engine
    engine.config = dataclasses.replace(engine.config, max_queue=1)
    room = engine.scheduler.max_batch + 1
    threads = [threading.Thread(target=lambda: llm.generate("abc", FREE)) for _ in range(room)]
    for thread in threads:
        thread.start()
    wait_until(lambda: llm._runner._num_open.total() == room)
    with pytest.raises(OverloadError, match="1 requests wait and the queue holds 1"):
        llm.generate("abc", FREE)
    with pytest.raises(OverloadError):
        llm.stream("abc", FREE)
    executor.let_go()
    for thread in threads:
        thread.join(60)
    assert llm.generate("abc", FREE).token_ids == reference_tokens(llm.tokenizer.encode("abc"), 20)


def test_a_cache_on_disk_needs_a_model_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="kv_dir"):
        LLM.from_parts(FakeExecutor(), FakeTokenizer(), config=EngineConfig(kv_dir=str(tmp_path)))
