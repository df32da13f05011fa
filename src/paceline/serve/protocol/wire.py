"""What every request and answer on the wire is made from.

Models are put together when they are first used (``defer_build``): all at once they take a third of a second, and a
server should be ready before that.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A request: a field that it does not know is an error that names it."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class WireAnswer(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(defer_build=True)
