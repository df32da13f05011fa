"""What every request on the wire is made from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A request: a field that it does not know is an error that names it."""

    model_config = ConfigDict(extra="forbid")
