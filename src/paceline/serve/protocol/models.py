"""Models and health on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """``max_model_len`` as vLLM says it: tokens that the context holds."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: str


class Readiness(BaseModel):
    """``progress_age_s``: since the engine got on while it had work, 0 without; null while the model loads."""

    status: Literal["ready", "loading", "stopping", "stalled"]
    progress_age_s: float | None
