"""Who may ask: API keys, each with a cache domain and a share of the queue of its own."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ParameterError


@dataclass(frozen=True)
class Client:
    """One of those who share the server.

    ``cache_domain`` is derived from the key: what is cached for one client is never found by another, and nothing that
    a request says can change that. ``name`` is what logs and metrics call it.
    """

    name: str
    cache_domain: str


EVERYBODY = Client("", "")
"""The only client of a server without keys."""


class KeyRing:
    """The keys of a server. Keeps digests alone; a check takes the same time whichever key it is, and however wrong."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """``keys``: name -> key. Empty: everybody is let in."""
        self._clients = [(_digest(key), Client(name, "key:" + _digest(key).hex())) for name, key in keys.items()]

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return not self._clients

    @property
    def num_clients(self) -> int:
        """Clients that share the queue."""
        return max(1, len(self._clients))

    def client_of(self, key: str | None) -> Client | None:
        """The client with that key, None when there is none."""
        if self.is_open:
            return EVERYBODY
        digest = _digest(key or "")
        found: Client | None = None
        for other, client in self._clients:  # all of them: an early end would tell which one it was
            if hmac.compare_digest(digest, other):
                found = client
        return found if key else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str) -> KeyRing:
    """The keys in a file, one a line: ``name: key``, or the key alone; ``#`` begins a comment line.

    Raises ``ParameterError`` for a file without keys, or with a name or key twice.
    """
    keys: dict[str, str] = {}
    for line in Path(path).read_text("ascii", "replace").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, separator, key = line.partition(":")
        name, key = (name.strip(), key.strip()) if separator else (f"key{len(keys) + 1}", line)
        can_be_sent = key.isascii() and key.isprintable() and " " not in key
        if not name or not key or not can_be_sent or name in keys or key in keys.values():
            allowed = "one key a line, `name: key` or the key alone, none twice, keys of visible ASCII characters"
            raise ParameterError("api_key_file", path, allowed)
        keys[name] = key
    if not keys:
        raise ParameterError("api_key_file", path, "a file with at least one key")
    return KeyRing(keys)
