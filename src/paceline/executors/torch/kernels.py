"""What a step of the torch executor spends its time in, replaceable as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from paceline.config import ModelConfig
from paceline.executors.torch.attention import PagedAttention, SplitAttention
from paceline.executors.torch.cuda_graphs import Recording
from paceline.executors.torch.products import MakeProduct, ProductMaker

LEAST_CAPABILITY = (8, 0)
"""Of the GPU (Ampere). For 7.5 Triton compiles the kernels to plain multiplications, with numbers in local memory."""


@dataclass(frozen=True)
class Kernels:
    """How products are made, attention over pages, the name that ``path()`` shows, and how decode steps are recorded
    (None: they are not)."""

    make_product: MakeProduct
    attention: PagedAttention
    name: str = "torch"
    recording: Recording | None = None

    @classmethod
    def of_torch(cls, model: ModelConfig, device: torch.device) -> Kernels:
        """Those of torch itself."""
        return cls(ProductMaker(device), SplitAttention.measured(model.head_dim, device))

    @classmethod
    def of_device(cls, model: ModelConfig, device: torch.device) -> Kernels:
        """Triton's where they run, else torch's."""
        if not has_triton_kernels(device):
            return cls.of_torch(model, device)
        from paceline.executors.torch.gpu_kernels import triton_kernels

        return triton_kernels(model, device)


def has_triton_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and ``device`` a GPU whose tensor cores take bf16."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return bool(torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY)
