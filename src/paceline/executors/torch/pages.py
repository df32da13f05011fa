"""The KV pool as tensors: keys and values rounded to the format when written, float32 when read.

A page holds 32 tokens of all layers, like the native executor's, and takes the same bytes, but lies more simply: layer,
keys then values, KV head, token, component; in int8 the scales of all vectors follow. So pages of the two executors
mean nothing to each other, and a store on disk keeps them apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import PAGE_TOKENS, SPLIT_TOKENS, KVFormat, ModelConfig
from paceline.kv.layout import KVLayout

STORED: dict[KVFormat, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "int8": torch.int8,
}
LARGEST_F16 = 65504.0
PAGES_PER_SPLIT = SPLIT_TOKENS // PAGE_TOKENS


class PagePool:
    """Pages [num_pages, page_bytes] of one model on one device."""

    def __init__(self, model: ModelConfig, kv_dtype: KVFormat, num_pages: int, device: torch.device) -> None:
        self.model = model
        self.format = kv_dtype
        self.num_pages = num_pages
        self.device = device
        page_bytes = KVLayout.of(model, kv_dtype).page_bytes
        if device.type == "cpu":  # numpy takes memory only where a page is used; torch would fill it with zeros
            self.bytes = torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
        else:
            self.bytes = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
        vectors = (model.num_layers, 2, model.num_kv_heads, PAGE_TOKENS)
        num_vectors = model.num_layers * 2 * model.num_kv_heads * PAGE_TOKENS
        scale_bytes = 2 * num_vectors if kv_dtype == "int8" else 0
        stored = self.bytes[:, : page_bytes - scale_bytes].view(STORED[kv_dtype])
        self.numbers = stored.unflatten(1, (*vectors, model.head_dim))
        """[pages, layers, 2, kv_heads, PAGE_TOKENS, head_dim]: keys are 0, values 1."""
        self.scales: Tensor | None = None
        """[pages, layers, 2, kv_heads, PAGE_TOKENS] bf16 where numbers are int8 codes."""
        if kv_dtype == "int8":
            self.scales = self.bytes[:, page_bytes - scale_bytes :].view(torch.bfloat16).unflatten(1, vectors)
        # Views that every step takes.
        self._layers = [self.numbers[:, layer] for layer in range(model.num_layers)]
        self._places = [layer.permute(0, 3, 1, 2, 4) for layer in self._layers]

    def copy(self, pairs: NDArray[np.int32]) -> None:
        """Copies pages [n, 2] (source, destination), one after the other."""
        for source, destination in pairs.tolist():
            self.bytes[destination] = self.bytes[source]

    def write(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Stores k and v [n, kv_heads, head_dim] at places of pages; where two are the same the last one stays."""
        x = torch.stack((k, v), dim=1)
        if self.scales is not None:
            x, scales = quantise_vectors(x)
            self.scales[:, layer].permute(0, 3, 1, 2)[pages, slots] = scales.to(torch.bfloat16)
        elif self.format == "f16":
            x = x.clamp(-LARGEST_F16, LARGEST_F16)
        self._places[layer].index_put_((pages, slots), x.to(self.numbers.dtype))

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, splits, kv_heads, SPLIT_TOKENS, head_dim] f32 of ``pages`` [n, splits *
        PAGES_PER_SPLIT]."""
        count, heads = len(pages), self.model.num_kv_heads
        flat = pages.flatten()
        shape = (count, -1, PAGES_PER_SPLIT, 2, heads, PAGE_TOKENS, self.model.head_dim)
        found = self._layers[layer].index_select(0, flat).view(shape)  # 12 times as fast as an index in brackets
        num_splits = found.shape[1]
        out = torch.empty(
            (2, count, num_splits, heads, PAGES_PER_SPLIT, PAGE_TOKENS, self.model.head_dim), device=self.device
        )
        out.copy_(found.permute(3, 0, 1, 4, 2, 5, 6))
        if self.scales is not None:
            scales = self.scales[:, layer].index_select(0, flat).view(shape[:-1]).permute(3, 0, 1, 4, 2, 5)
            out *= scales.float()[..., None]
        keys, values = out.view(2, count, num_splits, heads, SPLIT_TOKENS, self.model.head_dim)
        return keys, values


def quantise_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [..., head_dim] and scales [...] f32 of vectors; ``ops.reference.quantise_vectors`` says how."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(largest)
    live = finite & (largest >= 2.0**-119)
    ratio = torch.where(live, largest, 127.0) / 127.0
    scale = ((ratio.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    codes = torch.round(torch.where(live, x, 0.0) * (1.0 / scale)).to(torch.int8)
    return codes, torch.where(live, scale, torch.where(finite, 0.0, float("nan"))).squeeze(-1)


class DevicePages:
    """Pages of a pool that lies on a GPU, as far as those need them who only measure: their shape, and writing."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.shape = tuple(memory.shape)

    def __getitem__(self, part: slice) -> DevicePages:
        return DevicePages(self._memory[part])

    def __setitem__(self, pages: Any, value: int) -> None:
        self._memory[pages] = value
