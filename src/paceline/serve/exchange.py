"""One HTTP request on its way through the server, and what is known of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.outputs import Completion, Delta
from paceline.params import SamplingParams
from paceline.serve.keys import EVERYBODY, Client

CLIENT_LEFT = 499
"""The status of a request whose client did not wait for all of the answer, as nginx counts it; nobody is sent it."""


@dataclass
class Exchange:
    """Grows while the request is served. Times are readings of ``time.perf_counter``, which is the engine's clock too.

    endpoint           the path as the table of endpoints spells it, "" where there is none
    traceparent, tracestate
                       the caller's trace, if it says
    status             what it was answered, 0 until it has ended
    problem            the code of the error that it was answered
    is_streamed        whether the engine was asked for pieces
    params             what the engine was asked for first
    num_answers        answers that the engine was asked for
    num_prompt_tokens  of all its prompts
    num_output_tokens  that the engine has handed over
    num_unsent_tokens  of these, what the socket has not been handed
    asked_s            when the engine was asked first
    first_sent_s, last_sent_s
                       when the socket was handed the first tokens, and the latest
    completions        the answers that have ended
    """

    client: Client = EVERYBODY
    endpoint: str = ""
    method: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    traceparent: str | None = None
    tracestate: str | None = None
    started_s: float = field(default_factory=time.perf_counter)
    ended_s: float | None = None
    status: int = 0
    problem: str | None = None
    is_streamed: bool = False
    params: SamplingParams | None = None
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_unsent_tokens: int = 0
    asked_s: float | None = None
    first_sent_s: float | None = None
    last_sent_s: float | None = None
    completions: list[Completion] = field(default_factory=list)

    def asked(self, num_prompt_tokens: int, params: SamplingParams, *, streaming: bool, asked_s: float) -> None:
        """The engine has taken a prompt that it was asked for at ``asked_s``."""
        if self.asked_s is None:
            self.asked_s = asked_s
            self.params = params
        self.num_prompt_tokens += num_prompt_tokens
        self.num_answers += params.n
        self.is_streamed = streaming

    def heard(self, deltas: Sequence[Delta]) -> None:
        """These have come from the engine."""
        for delta in deltas:
            self.num_output_tokens += len(delta.token_ids)
            self.num_unsent_tokens += len(delta.token_ids)
            if delta.completion is not None:
                self.completions.append(delta.completion)

    @property
    def error(self) -> str | None:
        """What kind of error ended it, or an answer of it; None where all went well."""
        if self.problem is not None:
            return self.problem
        return next((type(answer.error).__name__ for answer in self.completions if answer.error is not None), None)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each answer ended: the engine's word, or for one that was given up ``disconnect`` or ``abort``."""
        given_up = "disconnect" if self.status == CLIENT_LEFT else "abort"
        reasons: list[str] = [answer.finish_reason for answer in self.completions]
        return reasons + [given_up] * (self.num_answers - len(reasons))

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache; the most of any answer."""
        return max((answer.num_cached_tokens for answer in self.completions), default=0)

    @property
    def num_drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(answer.speculation.proposed for answer in self.completions if answer.speculation is not None)

    @property
    def num_accepted(self) -> int:
        """Of these, what became output."""
        return sum(answer.speculation.accepted for answer in self.completions if answer.speculation is not None)

    @property
    def queue_s(self) -> float | None:
        """Longest time that an answer waited for its first step."""
        return max((answer.timing.queue_s for answer in self._begun), default=None)

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to its first token: handed to the socket, or of an answer that is not streamed,
        which nobody sees before its end, drawn by the engine. None without a token."""
        if self.is_streamed:
            return None if self.first_sent_s is None else self.first_sent_s - self.started_s
        if self.asked_s is None or not self._begun:
            return None
        return self.asked_s - self.started_s + min(answer.timing.ttft_s for answer in self._begun)

    @property
    def tpot_s(self) -> list[float]:
        """Of each answer with two tokens or more, the mean time of those after the first, by the engine's clock."""
        return [answer.timing.tpot_s for answer in self.completions if answer.num_completion_tokens > 1]

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the last byte handed to the socket, or until the client left; None while it lasts."""
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def _begun(self) -> list[Completion]:
        return [answer for answer in self.completions if answer.token_ids]
