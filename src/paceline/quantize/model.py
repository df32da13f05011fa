"""A quantised model as the writers of files read it: one tensor at a time, so that it is never in memory whole."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.quantize.scheme import Scheme
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import Checkpoint


class QuantizedModel(Protocol):
    """Names are canonical, rows are in the order of ``checkpoint`` (see ``Checkpoint.interleaved_rope``)."""

    checkpoint: Checkpoint
    """What it was made from: configuration, tokenizer files, names of all tensors."""

    scheme: Scheme

    def matrix(self, name: str) -> QuantizedMatrix | None:
        """The tensor's codes, None when it is not quantised (norms, biases, embeddings)."""
        ...

    def values(self, name: str) -> NDArray[np.float32]:
        """A tensor that is not quantised, as it is now: methods may have folded scales into norms."""
        ...
