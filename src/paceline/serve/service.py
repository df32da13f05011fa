"""What the handlers of one server share: the model, the settings, the keys, and the way to ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from paceline.errors import ContextLengthError
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.bandwidth import Bandwidth
from paceline.serve.bridge import AnswerStream, Bridge
from paceline.serve.errors import HTTPError, too_long
from paceline.serve.exchange import Exchange as Exchange  # handlers take both from here
from paceline.serve.keys import KeyRing
from paceline.serve.recent import Recent
from paceline.serve.request_totals import RequestTotals
from paceline.serve.settings import ServeSettings
from paceline.serve.spelling import Spelling
from paceline.serve.supervisor import Supervisor
from paceline.serve.watch import Watches

_T = TypeVar("_T")

ANY_MODEL = ("tgi", "dummy")
"""What Hugging Face's clients write for the model where they know an address alone."""

LONG_WORK = 4096
"""Characters or tokens from which work on them is for a thread: the loop would pause for a millisecond or more."""


class Service:
    """Lives on one event loop. ``llm`` is None until the model is loaded."""

    def __init__(self, settings: ServeSettings, keys: KeyRing, *, model: str) -> None:
        self.settings = settings
        self.keys = keys
        self.model = settings.served_name or model
        self.started = int(time.time())
        self.is_stopping = False
        self.is_ending = False  # and what still runs is cancelled
        self.totals = RequestTotals(by_client=settings.metrics_by_client)
        self.recent = Recent()
        self.watches = Watches([self.totals, self.recent])
        self.bandwidth: Bandwidth | None = None
        self._llm: LLM | None = None
        self._spelling: Spelling | None = None
        self._bridge: Bridge | None = None
        self._supervisor: Supervisor | None = None

    def use(self, llm: LLM) -> None:
        """Begins to serve a model, on the running loop."""
        self._bridge = Bridge(asyncio.get_running_loop(), coalesce_s=self.settings.coalesce_ms / 1000)
        self._supervisor = Supervisor(llm)
        llm.num_shares = self.keys.num_clients
        self._llm = llm
        self._spelling = Spelling(llm.tokenizer)

    @property
    def spelling(self) -> Spelling:
        """How the model's tokens are written; for a model that is loaded."""
        assert self._spelling is not None
        return self._spelling

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model to ask."""
        return self._llm is not None

    @property
    def status(self) -> Literal["loading", "stopping", "broken", "stalled", "ready"]:
        """Whether requests are taken, and why not; "stalled": a step takes longer than any should."""
        if self._llm is None:
            return "loading"
        if self.is_stopping:
            return "stopping"
        if self._llm.is_broken:
            return "broken"
        return "stalled" if self._llm.progress_age_s() > self.settings.max_stall_s else "ready"

    @property
    def num_restarts(self) -> int:
        """How often the engine has been started again."""
        return 0 if self._supervisor is None else self._supervisor.num_restarts

    @property
    def num_breaks(self) -> int:
        """How often an error outside any request has stopped the engine, whether it was started again or not."""
        return 0 if self._supervisor is None else self._supervisor.num_breaks

    @property
    def llm(self) -> LLM:
        """The model; 503 while it loads."""
        if self._llm is None:
            raise HTTPError(
                503,
                "the model is still loading",
                kind="server_error",
                code="model_loading",
                headers={"Retry-After": "1"},
            )
        return self._llm

    def check_model(self, name: str | None) -> None:
        """Raises 404 where a request names another model; none is this one, and so is a placeholder of a client."""
        if name is not None and name != self.model and name not in ANY_MODEL:
            raise HTTPError(
                404,
                f"the model {name!r} does not exist: this server has {self.model!r}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, without holding up the loop."""
        return await self.aside(len(text), self.llm.tokenizer.encode, text, add_special_tokens)

    async def aside(self, size: int, work: Callable[..., _T], *arguments: Any) -> _T:
        """What ``work`` on ``size`` characters or tokens returns, without holding up the loop."""
        return work(*arguments) if size < LONG_WORK else await asyncio.to_thread(work, *arguments)

    async def ask(
        self,
        exchange: Exchange,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        field: str,
        streaming: bool,
        embed: bool = False,
    ) -> AnswerStream:
        """Starts the answers to a prompt (or its embedding), which stands in ``field`` of the request. The caller
        closes the stream. Raises 400 where it is too long, and what ``LLM.submit`` raises."""
        limit = self.settings.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            raise too_long(f"the prompt has {len(prompt)} tokens and this server takes {limit}", field)
        llm = self.llm
        assert self._bridge is not None
        if params.structure is not None:  # it is compiled then, and asking takes microseconds
            await asyncio.to_thread(llm.prepare_structure, params.structure)
        stream = AnswerStream(self._bridge, exchange.heard, limit_s=self.settings.request_timeout_s)
        # Taken before: the engine's thread may run on before this one comes back, and its times count from then.
        asked_s = time.perf_counter()
        try:
            stream.start(llm, prompt, params, client=exchange.client, streaming=streaming, embed=embed)
        except ContextLengthError as error:
            raise too_long(str(error), field) from error
        exchange.asked(len(prompt), params, streaming=streaming, asked_s=asked_s)
        return stream
