"""Logits from a GPU to the host, through memory that the device writes to by itself.

A step of 32 rows and a vocabulary of 128k has 16 MB of logits. To pageable memory the driver copies them by way of a
buffer of its own, a second time; page-locked memory takes long to get, so it is kept from step to step.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """Copies of one tensor after the other."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def __call__(self, x: Tensor) -> NDArray[np.float32]:
        """x f32 as an array; from a GPU it is valid until the next call."""
        if x.device.type == "cpu":
            return np.ascontiguousarray(x.numpy())
        count = x.numel()
        if self._buffer is None or len(self._buffer) < count:
            self._buffer = torch.empty(count, dtype=torch.float32, pin_memory=True)
        copied = self._buffer[:count].view(x.shape)
        copied.copy_(x, non_blocking=True)
        torch.cuda.current_stream(x.device).synchronize()
        found: NDArray[np.float32] = copied.numpy()
        return found
