"""Models and health on the wire."""

from __future__ import annotations

from typing import Any, Literal

from paceline.serve.protocol.wire import WireAnswer


class ModelCard(WireAnswer):
    """``max_model_len`` as vLLM says it: tokens that the context holds."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    max_model_len: int | None = None


class ModelList(WireAnswer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(WireAnswer):
    status: str


class Readiness(WireAnswer):
    """``progress_age_s``: since the engine got on while it had work, 0 without; null while the model loads."""

    status: Literal["ready", "loading", "stopping", "broken", "stalled"]
    progress_age_s: float | None


class ErrorDetail(WireAnswer):
    """``param`` is the field that is wrong, where it is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(WireAnswer):
    """What is answered instead, and what the last event of a stream carries that could not be finished."""

    error: ErrorDetail


class OpenAPIDocument(WireAnswer):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
