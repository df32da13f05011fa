"""What an answer of OpenAI's API begins with, and each of its chunks."""

from __future__ import annotations

import time
from typing import Any

from paceline import __version__
from paceline.serve.exchange import Exchange

FINGERPRINT = f"paceline-{__version__}"


def head_of(exchange: Exchange, model: str, prefix: str, kind: str) -> dict[str, Any]:
    """``prefix`` of the id, and ``kind`` as the field "object" has it."""
    return {
        "id": f"{prefix}-{exchange.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }
