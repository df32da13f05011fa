"""Tensors on their way into a file whose header comes first and says where each of them lies.

Departures: the bytes are written twice, once here and once into the file, because a header cannot be written before
all tensors are known, and they are made one at a time. While a model is written it takes its room on disk twice.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.checksums import tensor_checksum


@dataclass(frozen=True)
class SpooledTensor:
    """A tensor in the spool: ``kind`` and ``shape`` as the file's header will say, the place and the checksum."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    checksum: int


class TensorSpool:
    """Tensors in the order in which they came. A context manager: the file is gone at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._mapped: mmap.mmap | None = None
        self.tensors: list[SpooledTensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def add(self, name: str, kind: str, shape: tuple[int, ...], data: NDArray[Any]) -> None:
        """Appends a tensor; ``data`` is its bytes in whatever type. All are added before the first is read."""
        assert self._mapped is None
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        start = self._file.tell()
        self._file.write(flat.data)
        checksum = tensor_checksum(name, kind, shape, flat)
        self.tensors.append(SpooledTensor(name, kind, shape, start, flat.nbytes, checksum))

    def data(self, tensor: SpooledTensor) -> NDArray[np.uint8]:
        """The bytes, flat."""
        if self._mapped is None:
            self._file.flush()
            self._mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.start)

    def __enter__(self) -> TensorSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink()
