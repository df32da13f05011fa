"""``quantization_config`` of config.json: how other programs are told what the tensors beside it are.

Source: the configurations that compressed-tensors, GPTQModel and AutoAWQ write, from their code.
Checked by: tests/golden/test_export_transformers.py (compressed-tensors' own reader), tests/unit/test_export.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import __version__
from paceline.quantize.scheme import Scheme


def compressed_tensors_config(scheme: Scheme, *, left_alone: Sequence[str]) -> dict[str, Any]:
    """pack-quantized weights, or int-quantized ones that meet int8 activations; ``left_alone`` are names of modules."""
    activations = None
    if scheme.per_token:
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme.per_token else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": scheme.bits,
                    "type": "int",
                    "symmetric": scheme.symmetric,
                    "strategy": "channel" if scheme.group is None else "group",
                    "group_size": scheme.group,
                    "dynamic": False,
                    "actorder": None,
                },
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", *left_alone],
        "kv_cache_scheme": None,
    }


def gptq_config(scheme: Scheme, *, left_alone: Sequence[str], has_order: bool) -> dict[str, Any]:
    """Version 2, whose zero points are stored as they are: version 1 has no zero point 0."""
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group is None else scheme.group,
        "desc_act": has_order,
        "sym": scheme.symmetric,
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"paceline:{__version__}"]},
    }
    if left_alone:
        config["dynamic"] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in left_alone}
    return config


def awq_config(scheme: Scheme, *, left_alone: Sequence[str]) -> dict[str, Any]:
    """Version gemm; symmetric matrices have the zero point 8."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": scheme.bits,
        "group_size": scheme.group,
        "zero_point": True,
        "modules_to_not_convert": list(left_alone) or None,
    }
