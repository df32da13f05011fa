"""Which rows of a step attention computes together, as tensors that stay the same for all layers.

Checked by: tests/triton/test_paged_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

SPLIT_KEYS = 128
"""Keys whose products are summed before splits are merged; ``executors/triton/paged_attention.py`` has the kernels."""


def tile_height(group: int) -> int:
    """Queries of a tile when ``group`` heads share a KV head: a power of two, at least what a tensor core takes."""
    return max(16, 1 << (group - 1).bit_length())


def tile_ranges(row_starts: NDArray[np.int32], group: int) -> NDArray[np.int32]:
    """[2, tiles] first rows and numbers of rows, for sequences whose rows are row_starts[s] : row_starts[s + 1]."""
    height = tile_height(group) // group
    lengths = np.diff(row_starts)
    tiles = -(-lengths // height)
    within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = np.repeat(row_starts[:-1], tiles) + within * height
    count = np.minimum(height, np.repeat(row_starts[1:], tiles) - first)
    return np.stack([first, count]).astype(np.int32)


def splits_for(num_tokens: int) -> int:
    """Splits that hold so many tokens."""
    return -(-num_tokens // SPLIT_KEYS)


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a step on a device, the same for all layers; all tensors are i32.

    tile_first, tile_count  [tiles]         rows tile_first : tile_first + tile_count are computed together
    positions               [rows]
    sequence_of_row         [rows]
    page_table              [sequences, p]  only entries of positions that a row sees are read
    max_splits                              at least ``splits_for`` the longest context; scratch is rows x heads x
                                            max_splits x d floats
    """

    tile_first: torch.Tensor
    tile_count: torch.Tensor
    positions: torch.Tensor
    sequence_of_row: torch.Tensor
    page_table: torch.Tensor
    max_splits: int

    @classmethod
    def of(
        cls,
        positions: NDArray[np.int32],
        row_starts: NDArray[np.int32],
        page_table: NDArray[np.int32],
        *,
        group: int,
        device: torch.device,
    ) -> AttentionRows:
        """Those of a plan, for ``group`` heads that share a KV head."""
        sequence_of_row = np.repeat(np.arange(len(row_starts) - 1, dtype=np.int32), np.diff(row_starts))
        arrays = [*tile_ranges(row_starts, group), positions, sequence_of_row, page_table]
        first, count, *others = (torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device) for x in arrays)
        return cls(first, count, others[0], others[1], others[2], splits_for(int(positions.max(initial=0)) + 1))
