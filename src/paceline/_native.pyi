"""Types of the native module; csrc/bindings*.cpp is its source."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import Activation, KVFormat

def isas() -> list[str]: ...
def best_isa() -> str: ...
def measure_bandwidth(num_threads: int) -> float: ...
def measure_int8_peak(isa: str, num_threads: int) -> float: ...
def pack_matrix(
    data: NDArray[np.uint8],
    kind: str,
    num_outputs: int,
    num_inputs: int,
    permutation: NDArray[np.int32] | None,
    order: NDArray[np.int32] | None,
    target_kind: str,
    group: int,
    offset: str,
    out: NDArray[np.uint8],
    num_threads: int,
) -> bool: ...
def sample(isa: str, *arguments: Any) -> Any: ...

class Program:
    def __init__(
        self,
        isa: str,
        num_threads: int,
        max_rows: int,
        max_outputs: int,
        vocab_size: int,
        num_pages: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_layers: int,
        kv_kind: KVFormat,
        pages_of: Program | None = None,
        num_logits: int | None = None,
    ) -> None: ...
    def add_matrix(
        self,
        data: NDArray[np.uint8],
        kind: str,
        group: int,
        offset: str,
        num_outputs: int,
        num_inputs: int,
        tile_bytes: int,
        num_groups: int,
        order: NDArray[np.int32] | None = None,
    ) -> int: ...
    def add_vector(self, data: NDArray[np.float32]) -> int: ...
    def add_buffer(self, width: int, outputs: bool = False, per_row: int = 1) -> int: ...
    def add_activations(self, width: int, outputs: bool = False, per_row: int = 1) -> int: ...
    def add_slots(self, num_experts: int, num_chosen: int) -> int: ...
    def add_rope(self, inverse_frequencies: list[float], factor: float = 1.0) -> int: ...
    def add_attention_plan(self, window: int = 0) -> int: ...
    def embed(self, matrix: int, to: int, scale: float = 1.0) -> None: ...
    def norm(self, from_: int, weight: int, eps: float, size: int, to_buffer: int, to_activations: int, /) -> None: ...
    def norm_in_place(self, buffer: int, column: int, weight: int, eps: float, size: int, joined: bool, /) -> None: ...
    def norm_add(
        self,
        from_: int,
        weight: int,
        eps: float,
        size: int,
        residual: int,
        to: int,
        next_weight: int,
        next_eps: float,
        to_buffer: int,
        to_activations: int,
        /,
    ) -> None: ...
    def quantise(self, from_: int, size: int, to: int, per_token: bool = False, order: Sequence[int] = ()) -> None: ...
    def linear(
        self,
        matrices: list[int],
        columns: list[int],
        biases: list[int],
        from_buffer: int,
        from_activations: int,
        to: int,
        accumulate: bool,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None: ...
    def gate_up(
        self,
        activation: Activation,
        gate: int,
        up: int,
        from_buffer: int,
        from_activations: int,
        to_buffer: int,
        to_activations: int,
        /,
    ) -> None: ...
    def glu(
        self,
        activation: Activation,
        from_: int,
        up_column: int,
        size: int,
        to_buffer: int,
        to_activations: int,
        /,
    ) -> None: ...
    def rope_write(
        self,
        layer: int,
        buffer: int,
        q_column: int,
        k_column: int,
        v_column: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        rope: int,
        query_scale: float,
        /,
    ) -> None: ...
    def attention(
        self, layer: int, buffer: int, out: int, plan: int, softcap: float = 0.0, sinks: int = -1
    ) -> None: ...
    def route(self, logits: int, slots: int, normalise: bool, to: int) -> None: ...
    def experts_glu(
        self,
        gate: int,
        up: int,
        gate_bias: int,
        up_bias: int,
        slots: int,
        activation: Activation,
        from_buffer: int,
        from_activations: int,
        to_buffer: int,
        to_activations: int,
    ) -> None: ...
    def experts_down(
        self,
        down: int,
        bias: int,
        slots: int,
        routing: int,
        from_buffer: int,
        from_activations: int,
        to: int,
        accumulate: bool,
    ) -> None: ...
    def select(self, from_: int, to: int, /) -> None: ...
    def sample(self, logits: int, /) -> None: ...
    def set_step(self, *arrays: NDArray[Any]) -> None: ...
    def run(self) -> None: ...
    def begin_step(self) -> None: ...
    def run_records(self, begin: int, end: int, /) -> None: ...
    def results(
        self, tokens: NDArray[np.int32], status: NDArray[np.uint32], logprobs: NDArray[np.float32], /
    ) -> None: ...
    def distributions(self, logits: int, *arrays: NDArray[Any]) -> None: ...
    def record_name(self, record: int, /) -> str: ...
    def buffer_stride(self, id: int, /) -> int: ...
    def buffer(self, id: int, rows: int, /) -> NDArray[np.float32]: ...
    def dequantised(self, activations: int, rows: int, /) -> NDArray[np.float32]: ...
    def kv(self) -> NDArray[np.uint8]: ...
    @property
    def num_records(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_outputs(self) -> int: ...
    def attention_units(self, plan: int = 0) -> list[tuple[list[int], int, int, int, int, int, int, str]]: ...
    def attention_merges(self, plan: int = 0) -> list[tuple[int, int, int, int]]: ...
    @property
    def attention_slots(self) -> int: ...
    @property
    def shared_splits(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def kv_kind(self) -> KVFormat: ...
    @property
    def num_threads(self) -> int: ...
