"""What is asked of a quantisation: the method, and what the codes look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ParameterError

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")
BITS = (8, 4, 3)
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Scheme:
    """How the layers' matrices are quantised.

    ``group`` inputs share a scale; None is one scale an output ("channel"). ``symmetric`` fixes the zero point at the
    middle code. SmoothQuant is W8A8: 8-bit symmetric weights, one scale an output, activations rounded to int8 with one
    scale a token. Raises ParameterError for what does not go together.
    """

    method: Method
    bits: int = 4
    group: int | None = 64
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ParameterError("method", self.method, f"one of {', '.join(METHODS)}")
        if self.bits not in BITS:
            raise ParameterError("bits", self.bits, f"one of {', '.join(map(str, BITS))}")
        if self.group is not None and self.group not in GROUPS:
            raise ParameterError("group", self.group, f"one of {', '.join(map(str, GROUPS))}, or channel")
        if self.method == "smoothquant" and (self.bits, self.group, self.symmetric) != (8, None, True):
            raise ParameterError("method", self.method, "8 bits, group channel, symmetric: it is W8A8")

    @property
    def per_token(self) -> bool:
        """Whether activations are rounded to int8 with one scale a token."""
        return self.method == "smoothquant"

    @property
    def highest_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def group_of(self, num_inputs: int, *, tensor: str) -> int:
        """Inputs that share a scale in a matrix of that width. ParameterError, offering what divides it, if none do."""
        if self.group is None:
            return num_inputs
        if num_inputs % self.group:
            possible = [str(group) for group in sorted(GROUPS, reverse=True) if num_inputs % group == 0]
            offer = " or ".join([*possible, "channel"])
            raise ParameterError("group", self.group, f"{tensor} has {num_inputs} inputs; possible are {offer}")
        return self.group
