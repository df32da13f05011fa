"""What keys and values belong to: the cache domain of a request, and all that decides their bits."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from paceline import __version__
from paceline.config import PAGE_TOKENS, EngineConfig, KVFormat, ModelConfig, WeightFormat

DIGEST_BYTES = 32

BITS_VERSION = 1
"""Raise it when the layout of a page, or the arithmetic that leads to its bits, changes within a release."""


@dataclass(frozen=True)
class StoreKey:
    """All that decides the bits of a stored page: pages are shared by whoever has an equal key, and by nobody else.

    ``model_hash`` is that of the files (``weights.model_hash``). ``embeddings`` is the format of the embedding table,
    which ``EngineConfig.head_bits`` changes when the head is tied to it. Threads, batch and chunk are not in it: they
    change no bit; nor is the instruction set, but as part of ``executor`` where bits depend on it.
    """

    model_hash: bytes
    model: ModelConfig
    weights: WeightFormat
    embeddings: WeightFormat
    kv_dtype: KVFormat
    executor: str
    page_tokens: int = PAGE_TOKENS
    release: str = __version__
    bits_version: int = BITS_VERSION

    def digest(self) -> bytes:
        """32 bytes that differ whenever a field does."""
        return digest("store", self)

    def describe(self) -> dict[str, Any]:
        """The fields as JSON values, for people."""
        return {**dataclasses.asdict(self), "model_hash": self.model_hash.hex()}


def store_key(model: ModelConfig, config: EngineConfig, *, model_hash: bytes, executor: str) -> StoreKey:
    """The key of the pages that ``executor`` (``ExecutorChoice.key``) computes for a model under ``config``."""
    return StoreKey(
        model_hash=model_hash,
        model=model,
        weights=config.weights,
        embeddings=config.weights_of("token_embd.weight", tied_embeddings=model.tie_embeddings),
        kv_dtype=config.kv_dtype,
        executor=executor,
    )


def domain_key(domain: str) -> bytes:
    """The 32 bytes that stand for a cache domain: the root of every chain of pages in it."""
    return digest("domain", domain)


def digest(label: str, *fields: object) -> bytes:
    """32 bytes of BLAKE2b over ``label`` (what is hashed) and the fields, each with its type and length in front.

    So no two different lists of fields give the same input. Fields are None, bool, int, float, str, bytes, tuples and
    dataclasses of those.
    """
    state = blake2b(digest_size=DIGEST_BYTES)
    for field in (label, *fields):
        state.update(_encoded(field))
    return state.digest()


def _encoded(field: object) -> bytes:
    if dataclasses.is_dataclass(field) and not isinstance(field, type):
        named = ((item.name, getattr(field, item.name)) for item in dataclasses.fields(field))
        return _framed(b"d", _encoded(type(field).__name__) + b"".join(_encoded(pair) for pair in named))
    match field:
        case None:
            return _framed(b"n", b"")
        case bool():  # before int, of which it is a kind
            return _framed(b"o", bytes([field]))
        case int():
            return _framed(b"i", str(field).encode())
        case float():
            return _framed(b"f", struct.pack("<d", field))
        case str():
            return _framed(b"s", field.encode(errors="surrogatepass"))
        case bytes():
            return _framed(b"b", field)
        case tuple():
            return _framed(b"t", b"".join(_encoded(item) for item in field))
    raise AssertionError(f"{type(field).__name__} has no encoding")


def _framed(kind: bytes, payload: bytes) -> bytes:
    return kind + len(payload).to_bytes(8, "little") + payload
