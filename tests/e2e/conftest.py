"""One server for all end-to-end tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import MODEL, ServerProcess, running_server

from paceline.weights.catalog import resolve_model


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server with SmolLM2 and default settings; shared, so tests must not count on being alone there."""
    resolve_model(MODEL)
    with running_server() as started:
        yield started
