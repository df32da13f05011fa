"""How large the KV cache is: bytes of a token and of a page, pages that memory allows, and the table that says so."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import PAGE_TOKENS, KVFormat, ModelConfig
from paceline.errors import MemoryBudgetError

AVAILABLE_SHARE = 0.5
"""Largest part of the memory that weights and workspace leave which the pool takes unasked: the rest is the user's."""

VALUE_BYTES: dict[KVFormat, int] = {"f16": 2, "bf16": 2, "f32": 4, "int8": 1}
SCALE_BYTES = 2
"""Of an int8 key or value: bf16."""


@dataclass(frozen=True)
class KVLayout:
    """Keys and values of a model in pages of ``PAGE_TOKENS`` tokens, all layers together. The one place in Python that
    knows how large a page is; the native module's ``head_page_bytes`` is the other.
    """

    bytes_per_token: int

    @classmethod
    def of(cls, model: ModelConfig, kv_dtype: KVFormat) -> KVLayout:
        """The layout of a model in a KV format: per layer and KV head a key and a value, each with a scale in int8."""
        vector_bytes = VALUE_BYTES[kv_dtype] * model.head_dim + (SCALE_BYTES if kv_dtype == "int8" else 0)
        return cls(bytes_per_token=2 * vector_bytes * model.num_kv_heads * model.num_layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return PAGE_TOKENS * self.bytes_per_token


def pages_for(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory goes. ``available_bytes`` is what was free before weights were loaded."""

    available_bytes: int
    weight_bytes: int
    workspace_bytes: int
    layout: KVLayout
    num_pages: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole pool; pages that no request ever used are never touched, so they cost nothing yet."""
        return self.num_pages * self.layout.page_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the pool."""
        return self.num_pages * PAGE_TOKENS

    def table(self) -> str:
        """The plan as lines of text."""
        pool = format_bytes(self.kv_bytes)
        rows = [
            ("available", format_bytes(self.available_bytes)),
            ("weights", format_bytes(self.weight_bytes)),
            ("workspace", format_bytes(self.workspace_bytes)),
            ("KV per token", format_bytes(self.layout.bytes_per_token)),
            ("KV pool", f"up to {pool}, taken as it fills, in {self.num_pages:,} pages of {PAGE_TOKENS} tokens"),
            ("tokens that fit", f"{self.num_tokens:,}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan_memory(
    layout: KVLayout,
    *,
    available_bytes: int,
    weight_bytes: int,
    workspace_bytes: int,
    max_batch: int,
    context_length: int,
    kv_memory_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for an engine.

    The pool takes ``kv_memory_bytes`` when given, else ``AVAILABLE_SHARE`` of what is left, but not more than
    ``max_batch`` requests of ``context_length`` tokens can use. Raises ``MemoryBudgetError`` when not one page fits, or
    less is available than was asked for.
    """
    left = available_bytes - weight_bytes - workspace_bytes
    useful = max_batch * pages_for(context_length)
    asked = kv_memory_bytes if kv_memory_bytes is not None else int(max(0, left) * AVAILABLE_SHARE)
    num_pages = asked // layout.page_bytes
    if kv_memory_bytes is None:
        num_pages = min(useful, num_pages)
    if num_pages < 1 or num_pages * layout.page_bytes > left:
        origin = "kv_memory_bytes" if kv_memory_bytes is not None else f"{AVAILABLE_SHARE:.0%} of the rest"
        raise MemoryBudgetError(
            f"{format_bytes(available_bytes)} of memory are available; weights take {format_bytes(weight_bytes)}, the "
            f"workspace {format_bytes(workspace_bytes)}, and the KV pool was to take {format_bytes(asked)} ({origin}) "
            f"in pages of {format_bytes(layout.page_bytes)} ({PAGE_TOKENS} tokens of "
            f"{format_bytes(layout.bytes_per_token)}): free memory, set kv_memory_bytes, or use smaller weights"
        )
    return MemoryPlan(available_bytes, weight_bytes, workspace_bytes, layout, num_pages)


def format_bytes(count: int) -> str:
    """A number of bytes in the unit that fits: "23.0 kB", "98.4 MB" (powers of 1000)."""
    if abs(count) < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if abs(value) < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"
