"""Whether an answer is one."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.engine.outputs import Completion
from paceline.serve.errors import HTTPError


def failure_of(completion: Completion) -> Exception | None:
    """Why an answer that has ended is none, None when it is one. One that was aborted has lost its end."""
    if completion.error is not None:
        return completion.error
    if completion.finish_reason == "abort":
        return HTTPError(
            503, "the answer was aborted", kind="server_error", code="aborted", headers={"Retry-After": "1"}
        )
    return None


def check_outcomes(completions: Iterable[Completion]) -> None:
    """Raises the first failure among some answers."""
    for completion in completions:
        failure = failure_of(completion)
        if failure is not None:
            raise failure
