"""What a step of the torch executor spends its time in, replaceable as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.config import ModelConfig
from paceline.executors.torch.attention import PagedAttention, SplitAttention
from paceline.executors.torch.cuda_graphs import Recording
from paceline.executors.torch.products import MakeProduct, ProductMaker


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
        """Triton's on a CUDA GPU where it is installed, else torch's."""
        if device.type == "cuda":
            try:
                from paceline.executors.torch.gpu_kernels import triton_kernels
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
            else:
                return triton_kernels(model, device)
        return cls.of_torch(model, device)
