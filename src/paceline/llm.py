"""A language model to talk to: generate, stream, chat; thin over the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from types import TracebackType
from typing import Any, Literal, overload

from paceline.config import EngineConfig, ModelConfig
from paceline.engine.engine import Engine, Update
from paceline.engine.executor_choice import ExecutorChoice, ExecutorName
from paceline.engine.outputs import Completion, Delta
from paceline.engine.parts import EngineParts
from paceline.engine.pooling import EMBEDDING_PARAMS, Embedding, embedding_of
from paceline.engine.prompts import (
    Messages,
    Prompt,
    PromptTokenizer,
    Template,
    answers_of,
    is_list_like,
    is_single,
)
from paceline.engine.request import Request, mix_seed
from paceline.engine.runner import EngineRunner, Sink
from paceline.engine.stats import EngineStats
from paceline.engine.stream import DeltaStream, Gathering, Submission, gather
from paceline.errors import PacelineError, ParameterError, UnsupportedError
from paceline.executors.base import Executor
from paceline.kv.layout import KVLayout, MemoryPlan
from paceline.machine import detect_machine
from paceline.params import SamplingParams, Structure
from paceline.speculate.speculator import Speculator


class LLM:
    """A loaded model. May be used from several threads and from asyncio at once: all calls share the batch.

    ``model`` is an alias, a .gguf file, a Hugging Face directory, or a hub id; fields of ``EngineConfig`` may be given
    one by one. ``executor`` "torch" runs in PyTorch, on ``device`` "cpu" or "cuda"; "reference" runs the plain
    definition of every operation: slow, for tests and debugging.
    ``wrap`` makes of the executor what the engine is given instead, such as one that records each step.

    A prompt is text (special tokens are added) or a list of token ids (taken as they are). Impossible input raises
    before anything runs. A request that fails while it runs raises when it was asked for alone; in a list it yields a
    ``Completion`` whose ``finish_reason`` is "error", and the others go on. An interrupt aborts what was asked for, and
    the LLM stays usable.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: PromptTokenizer
    load_s: float

    def __init__(
        self,
        model: str,
        *,
        config: EngineConfig | None = None,
        executor: ExecutorName = "native",
        device: str = "cpu",
        wrap: Callable[[Executor], Executor] | None = None,
        **config_fields: Any,
    ) -> None:
        start = time.perf_counter()
        choice = ExecutorChoice(executor, device)
        # Loaded here: the engine itself needs no file format, and `import paceline` stays quick.
        from paceline.engine.loading import load_model

        loaded = load_model(model, _with_fields(config or EngineConfig(), config_fields), choice, wrap)
        self._assemble(loaded.parts, loaded.tokenizer, loaded.chat_template, loaded.memory)
        self.load_s = time.perf_counter() - start

    @classmethod
    def from_parts(
        cls,
        executor: Executor,
        tokenizer: PromptTokenizer,
        *,
        config: EngineConfig | None = None,
        chat_template: Template | None = None,
        memory: MemoryPlan | None = None,
        speculator: Speculator | None = None,
    ) -> LLM:
        """An LLM over parts that exist already. It speculates as ``config.speculate`` says (None: not at all), or with
        ``speculator``."""
        from paceline.engine.speculation import use_speculation

        if config is not None and config.kv_dir is not None:
            raise ParameterError("kv_dir", config.kv_dir, "None here: parts do not say which model their pages are of")
        llm = cls.__new__(cls)
        machine = detect_machine(config.isa if config else None)
        config = (config or EngineConfig()).resolve(machine)
        config = dataclasses.replace(config, context_length=config.context_length or executor.model.context_length)
        layout = KVLayout.of(executor.model, config.kv_dtype)
        memory = memory or MemoryPlan(machine.available_bytes, 0, 0, layout, executor.num_pages)
        use: Callable[[Engine], object] = partial(use_speculation, config=config, tokenizer=tokenizer)
        if speculator is not None:
            use = methodcaller("use_speculator", speculator)
        llm._assemble(EngineParts(executor, tokenizer, config, use), tokenizer, chat_template, memory)
        llm.load_s = 0.0
        return llm

    def _assemble(
        self, parts: EngineParts, tokenizer: PromptTokenizer, chat_template: Template | None, memory: MemoryPlan
    ) -> None:
        executor = parts.executor
        self.config = parts.config
        self.model_config = executor.model
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        # What the executor knows exactly replaces what was estimated before it existed.
        self._memory = dataclasses.replace(
            memory,
            weight_bytes=getattr(executor, "weight_bytes", memory.weight_bytes),
            workspace_bytes=getattr(executor, "workspace_bytes", memory.workspace_bytes),
            num_pages=executor.num_pages,
        )
        self._executor = executor
        self._parts = parts
        self._when_broken: list[Callable[[], object]] = []
        self._ending = threading.Lock()
        self._start(*parts.make())

    def _start(self, engine: Engine, on_end: Callable[[], object]) -> None:
        callbacks = self._when_broken
        self._engine = engine
        self._runner = EngineRunner(engine, on_end, on_broken=lambda: [callback() for callback in callbacks])
        # The runner's thread does not refer to this object, so dropping the LLM (or leaving the program) ends the
        # thread.
        self._finalizer = weakref.finalize(self, self._runner.close)

    # Asking

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is itself a sequence of texts
        self, prompts: Prompt, params: SamplingParams | None = None, *, cache_domain: str = ""
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_domain: str = "",
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_domain: str = "",
    ) -> Completion | list[Completion]:
        """The answer to a prompt, or to each of a list (as one batch), with one ``params`` or one for each.

        What was computed for a request may serve later ones of the same ``cache_domain`` that begin alike, and no
        others.
        """
        groups = self._request_groups(prompts, params, cache_domain)
        requests = [request for group in groups for request in group]
        return answers_of(gather(self._runner, requests), groups, single=is_single(prompts))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, cache_domain: str = "") -> DeltaStream:
        """The pieces of the answer to a prompt as they come. Closing or dropping the iterator aborts the request."""
        requests = self._requests(prompt, params or SamplingParams(), cache_domain, streaming=True)
        return DeltaStream(self._runner, requests, owner=self)

    def embed(self, prompts: Sequence[Prompt], *, cache_domain: str = "", normalize: bool = False) -> list[Embedding]:
        """The mean-pooled hidden states of each prompt (``MeanPool``), of length 1 where ``normalize`` says so.

        They depend on the prompt alone, not on the batch. Raises the error of a prompt that failed."""
        if not is_list_like(prompts) or is_single(prompts):
            raise ParameterError("prompts", prompts, "a list of prompts: texts, or lists of token ids")
        requests = [self._requests(prompt, EMBEDDING_PARAMS, cache_domain, embed=True)[0] for prompt in prompts]
        return [embedding_of(completion, normalize=normalize) for completion in gather(self._runner, requests)]

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        cache_domain: str = "",
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        cache_domain: str = "",
    ) -> Iterator[Delta]: ...

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, stream: bool, cache_domain: str = ""
    ) -> Completion | Iterator[Delta]: ...

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        cache_domain: str = "",
    ) -> Completion | Iterator[Delta]:
        """The assistant's next message, or its pieces. ``messages`` are mappings with "role" and "content"."""
        prompt = self.chat_tokens(messages)
        if stream:
            return self.stream(prompt, params, cache_domain=cache_domain)
        return self.generate(prompt, params, cache_domain=cache_domain)

    def chat_tokens(self, messages: Messages) -> list[int]:
        """The tokens that the model's chat template makes of ``messages``; ``UnsupportedError`` without a template."""
        if self.chat_template is None:
            raise UnsupportedError("this model has no chat template: give a prompt instead of messages")
        return self.tokenizer.encode(self.chat_template.render(messages), add_special_tokens=False)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]  # as above
        self, prompts: Prompt, params: SamplingParams | None = None, *, cache_domain: str = ""
    ) -> Completion: ...

    @overload
    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_domain: str = "",
    ) -> list[Completion]: ...

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_domain: str = "",
    ) -> Completion | list[Completion]:
        """``generate`` for asyncio; cancelling it aborts the requests."""
        import asyncio  # not at the top: a quarter of the time that this module takes to import

        groups = self._request_groups(prompts, params, cache_domain)
        requests = [request for group in groups for request in group]
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        gathering = Gathering(requests, lambda: loop.call_soon_threadsafe(done.set))
        if requests:
            try:
                self._runner.submit(requests, gathering)
                await done.wait()
            finally:
                if not done.is_set():
                    self._runner.abort(requests)
        return answers_of(gathering.completions(), groups, single=is_single(prompts))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_domain: str = ""
    ) -> AsyncIterator[Delta]:
        """``stream`` for asyncio; closing the generator or cancelling its task aborts the request."""
        import asyncio

        requests = self._requests(prompt, params or SamplingParams(), cache_domain, streaming=True)
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update] = asyncio.Queue()
        num_open = len(requests)
        try:
            self._runner.submit(requests, lambda update: loop.call_soon_threadsafe(updates.put_nowait, update))
            while num_open:
                update = await updates.get()
                if update.completion is not None:
                    num_open -= 1
                    if update.completion.error is not None:
                        raise update.completion.error
                assert update.delta is not None
                yield update.delta
        finally:
            if num_open:
                self._runner.abort(requests)

    async def achat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        cache_domain: str = "",
    ) -> Completion | AsyncIterator[Delta]:
        """``chat`` for asyncio."""
        prompt = self.chat_tokens(messages)
        if stream:
            return self.astream(prompt, params, cache_domain=cache_domain)
        return await self.agenerate(prompt, params, cache_domain=cache_domain)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        *,
        cache_domain: str = "",
        share: str = "",
        streaming: bool = True,
        embed: bool = False,
    ) -> Submission:
        """Asks without waiting: ``sink`` gets each update, in the engine's thread, until each of the ``params.n``
        answers has had one with a completion. For servers; may be called from any thread.

        Requests of a ``share`` take turns with those of others, however many wait in it. With ``embed``, and
        ``EMBEDDING_PARAMS``, the completion is ``pooled``."""
        self._runner.check_room(share, params.n)  # before anything is spent on it
        requests = self._requests(prompt, params, cache_domain, share=share, streaming=streaming, embed=embed)
        self._runner.submit(requests, sink)
        return Submission(self._runner, requests)

    @property
    def num_shares(self) -> int:
        """How many shares divide the places of ``max_queue`` among them, evenly; 1 unless it is set."""
        return self._engine.num_shares

    @num_shares.setter
    def num_shares(self, num_shares: int) -> None:
        self._engine.num_shares = num_shares

    def prepare_structure(self, structure: Structure) -> None:
        """Compiles a structure, which takes milliseconds to a second, so that asking for answers with it is quick. May
        be called from any thread; what does not compile is a ``ParameterError`` here as it is when it is asked for."""
        self._engine.prepare_structure(structure)

    # Looking

    def stats(self) -> EngineStats:
        """What the engine has done so far, and those before it that broke."""
        return self._engine.stats()

    def progress_age_s(self) -> float:
        """Seconds since the engine last got on while it had work, 0 when it has none: of a step that hangs it grows."""
        return self._engine.progress_age_s()

    def path(self) -> dict[str, str | int]:
        """The path that really runs: isa, threads, weights, kv_dtype, speculation; and speculation_failure, what a
        drafter raised last, where one did."""
        return {**self._executor.path(), **self._engine.speculation}

    @contextlib.contextmanager
    def without_drafts(self) -> Iterator[None]:
        """While it lasts nothing is speculated, for any request: answers are the same, only their speed is not."""
        engine = self._engine
        engine.hold_drafts(True)
        try:
            yield
        finally:
            engine.hold_drafts(False)

    @property
    def memory(self) -> MemoryPlan:
        """Where the memory goes."""
        return self._memory

    def memory_table(self) -> str:
        """Weights, workspace, KV per token and the tokens that fit, as lines of text."""
        return self._memory.table()

    def close(self) -> None:
        """Aborts all requests and stops the engine. May be called again."""
        with self._ending:
            self._finalizer()

    @property
    def is_broken(self) -> bool:
        """Whether an error outside any request has stopped the engine: nothing is answered until ``restart``."""
        return self._runner.is_broken

    def when_broken(self, callback: Callable[[], object]) -> None:
        """Has ``callback`` called, in the engine's thread, when an error outside any request has stopped the engine and
        all who waited have been told. It must not wait for this LLM."""
        self._when_broken.append(callback)

    def restart(self) -> None:
        """Has a new engine over the same model take the place of one that is broken, with an empty prefix cache but for
        what is on disk. Does nothing to one that runs. Raises ``PacelineError`` once this LLM is closed."""
        with self._ending:
            if not self._finalizer.alive:
                raise PacelineError("this LLM is closed")
            if self._runner.is_broken:
                self._finalizer()  # waits for the last words of the old one
                self._start(*self._parts.make_again(self._engine))

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Requests

    def _requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_domain: str,
        *,
        share: str = "",
        streaming: bool = False,
        embed: bool = False,
    ) -> list[Request]:
        """The ``params.n`` requests of one prompt; their draws share a seed and differ by choice."""
        if not isinstance(params, SamplingParams):
            raise ParameterError("params", params, "SamplingParams")
        if not is_list_like(prompt):
            raise ParameterError("prompt", prompt, "text, or a list of token ids")
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(cache_domain, str):
            raise ParameterError("cache_domain", cache_domain, "text")
        make = partial(
            self._engine.make_request,
            tokens,
            params,
            streaming=streaming,
            cache_domain=cache_domain,
            share=share,
            embed=embed,
        )
        first = make()
        seed = params.seed if params.seed is not None else mix_seed(self.config.seed, first.request_id)
        return [first, *(make(choice=choice, seed=seed) for choice in range(1, params.n))]

    def _request_groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_domain: str,
    ) -> list[list[Request]]:
        """The requests of each prompt, all validated before any runs."""
        if not is_list_like(prompts):
            raise ParameterError("prompts", prompts, "text, a list of token ids, or a list of those")
        items: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(items)
        else:
            each = list(params)
            if len(each) != len(items):
                raise ParameterError("params", len(each), f"one, or as many as there are prompts ({len(items)})")
        return [self._requests(prompt, one, cache_domain) for prompt, one in zip(items, each, strict=True)]


def _with_fields(config: EngineConfig, fields: Mapping[str, Any]) -> EngineConfig:
    """``config`` with some fields replaced; an unknown name is an error that lists the known ones."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in fields.items():
        if name not in known:
            raise ParameterError(name, value, f"unknown option; the options are {', '.join(known)}")
    return dataclasses.replace(config, **fields)
