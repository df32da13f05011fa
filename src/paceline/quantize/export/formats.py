"""Which file format holds what: asked before any work is done."""

from __future__ import annotations

from typing import Literal

from paceline.config import ModelConfig
from paceline.errors import ParameterError, UnsupportedError
from paceline.quantize.export.head import GROUP, head_name
from paceline.quantize.scheme import Scheme
from paceline.weights.inventory import expected_shapes

Format = Literal["compressed-tensors", "gptq", "awq", "gguf", "paceline"]
FORMATS: tuple[Format, ...] = ("compressed-tensors", "gptq", "awq", "gguf", "paceline")

HEAD_BITS = (16, 8, 4)
"""What the head may be stored with; 16 is f16."""

EXPORTED = ("llama", "qwen2", "qwen3")
"""Architectures whose configuration and tensors Paceline can also write as other programs call them."""

LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def default_format(config: ModelConfig) -> Format:
    """What is written unasked: what other programs read too, where there is such a file of the family."""
    return "compressed-tensors" if config.architecture in EXPORTED else "paceline"


def check_format(config: ModelConfig, scheme: Scheme, fmt: str, *, head_bits: int | None = None) -> None:
    """ParameterError, naming the formats that would do, when a model of that configuration and scheme cannot be written
    in that format; also when the group does not divide a matrix. UnsupportedError for a mixture of experts.
    """
    if config.experts is not None:
        raise UnsupportedError(f"{config.architecture}: a mixture of experts; Paceline quantises dense models")
    if fmt not in FORMATS:
        raise ParameterError("format", fmt, f"one of {', '.join(FORMATS)}")
    if head_bits is not None and head_bits not in HEAD_BITS:
        raise ParameterError("head_bits", head_bits, f"one of {', '.join(map(str, HEAD_BITS))}, or None")
    for name, shape in expected_shapes(config).items():
        if is_layer_matrix(name):
            scheme.group_of(shape[1], tensor=name)
    if head_bits in (8, 4) and config.hidden_size % GROUP:
        allowed = f"{head_name(config)} has {config.hidden_size} inputs, no multiple of {GROUP}: 16"
        raise ParameterError("head_bits", head_bits, allowed)
    problem = _problem(config, scheme, fmt, head_bits)
    if problem is None:
        return
    others = [other for other in FORMATS if _problem(config, scheme, other, head_bits) is None]
    advice = f"; formats that hold it: {', '.join(others)}" if others else ""
    raise ParameterError("format", fmt, problem + advice)


def is_layer_matrix(name: str) -> bool:
    """Whether the tensor of that canonical name is a matrix of a layer."""
    return name.startswith("blk.") and name.endswith(".weight") and name.split(".")[2] in LAYER_MATRICES


def _problem(config: ModelConfig, scheme: Scheme, fmt: str, head_bits: int | None) -> str | None:
    """Why the format cannot hold it, None when it can."""
    if fmt != "paceline" and config.architecture not in EXPORTED:
        return f"Paceline writes it for {', '.join(EXPORTED)}, not for {config.architecture}"
    if scheme.per_token and fmt not in ("compressed-tensors", "paceline"):
        return "it cannot say that activations are int8 (W8A8)"
    if head_bits is not None and fmt not in ("gguf", "paceline"):
        which = "tied embeddings" if config.tie_embeddings else "a head"
        return f"it is written without {which} of {head_bits} bits (--head-bits)"
    if fmt == "awq" and scheme.bits != 4:
        return f"it has 4 bits, not {scheme.bits}"
    if fmt == "awq" and scheme.group is None:
        return "it has groups of inputs, not one scale an output (--group channel)"
    if fmt == "gguf":
        return _gguf_problem(scheme)
    return _width_problem(config, scheme, fmt)


def _gguf_problem(scheme: Scheme) -> str | None:
    if scheme.group != 32:
        given = "one scale an output" if scheme.group is None else f"groups of {scheme.group}"
        return f"its Q4_0, Q4_1 and Q8_0 have groups of 32 (--group 32), not {given}"
    if scheme.bits not in (4, 8):
        return f"it is written with 4 or 8 bits, not {scheme.bits}"
    if scheme.bits == 8 and not scheme.symmetric:
        return "its Q8_0 has no zero points (--sym)"
    return None


def _width_problem(config: ModelConfig, scheme: Scheme, fmt: str) -> str | None:
    """GPTQ and AWQ pack whole words of 32 bits along the outputs; GPTQ's words and our blocks are of 32 inputs."""
    for name, (num_outputs, *inputs) in expected_shapes(config).items():
        if not is_layer_matrix(name):
            continue
        if fmt in ("awq", "gptq") and num_outputs * scheme.bits % 32:
            return f"{name} has {num_outputs} outputs, no whole number of words of {scheme.bits}-bit codes"
        if fmt in ("gptq", "paceline") and inputs[0] % 32:
            return f"{name} has {inputs[0]} inputs, no multiple of 32"
    return None
