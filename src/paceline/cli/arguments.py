"""Arguments that several commands share: the model, the engine's configuration, the sampling parameters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import ACCEPTANCES, KV_FORMATS, WEIGHT_FORMATS, EngineConfig

if TYPE_CHECKING:
    from paceline.params import SamplingParams, Structure

DEFAULT_MODEL = "smollm2-135m"

ENGINE_FIELDS = {
    "weights": "weights",
    "head_bits": "head_bits",
    "kv": "kv_dtype",
    "threads": "num_threads",
    "isa": "isa",
    "context": "context_length",
    "max_batch": "max_batch",
    "token_budget": "token_budget",
    "kv_memory": "kv_memory_bytes",
    "prefix_cache": "prefix_cache",
    "kv_dir": "kv_dir",
    "kv_dir_size": "kv_dir_bytes",
    "max_queue": "max_queue",
    "max_gap_ms": "max_gap_ms",
    "speculate": "speculate",
    "acceptance": "acceptance",
    "draft_tokens": "draft_tokens",
}
"""Flag (as its attribute) -> field of ``EngineConfig``."""

SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "n": "n",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_id": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "structure": "structure",
}
"""Flag (as its attribute) -> field of ``SamplingParams``."""

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


BITS = {"4": "int4", "8": "int8"}
"""Numbers of bits as ``paceline quantize --head-bits`` has them -> weight format."""


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, the default model when it is left out."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="an alias (see `paceline models`), a .gguf file, a Hugging Face directory or a hub id",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``EngineConfig``; one that is not given leaves the field's own default."""
    group = add_load_arguments(parser)
    add = _adder(group)
    add("--context", type=int, metavar="N", help="tokens a request may reach (default: the model's own limit)")
    add("--max-batch", type=int, metavar="N", help="requests that run together")
    add("--token-budget", type=int, metavar="N", help="tokens computed in one step, so the size of a prefill chunk")
    add("--kv-memory", type=byte_size, metavar="SIZE", help="memory for cached keys and values, such as 512M or 2G")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt whole, also where it begins like an earlier one",
    )
    add("--kv-dir", metavar="DIR", help="keep the prefix cache in DIR, across restarts")
    add("--kv-dir-size", type=byte_size, metavar="SIZE", help="most that it may take there (default 4G)")
    add("--max-queue", type=int, metavar="N", help="most requests that may wait (default: no limit)")
    add(
        "--max-gap-ms",
        type=float,
        metavar="MS",
        help="longest gap between the tokens of an answer while other prompts are read (default 100)",
    )
    drafts = group.add_mutually_exclusive_group()
    _adder(drafts)(
        "--speculate",
        metavar="HOW",
        help="who drafts tokens for a step to verify: auto (default), off, suffix, ngram, forced, draft:MODEL, "
        "draft:self:WEIGHTS, eagle:DIR, or several joined by +; no answer changes by it",
    )
    _adder(drafts)(
        "--draft",
        dest="speculate",
        type="suffix+draft:{}".format,
        metavar="MODEL",
        help="a smaller model with the same vocabulary, or self:int4 for the model itself with other weights: "
        "short for --speculate suffix+draft:MODEL",
    )
    add(
        "--acceptance",
        choices=ACCEPTANCES,
        help="coupled: the same seed gives the same answer with and without drafts (default); exact: the same law, "
        "and more is accepted",
    )
    add("--draft-tokens", type=int, metavar="N", help="verify so many at every step (default: as many as pay)")
    group.add_argument("--verbose", action="store_true", help="print where the memory goes, on standard error")


def add_load_arguments(parser: argparse.ArgumentParser) -> Any:
    """Those of the flags of ``EngineConfig`` that decide how a model is loaded; the group, for more of them."""
    group = parser.add_argument_group("engine")
    add = _adder(group)
    add(
        "--weights",
        choices=WEIGHT_FORMATS,
        help="format the weights are brought into at load; native keeps the file's (default)",
    )
    add(
        "--head-bits",
        type=lambda text: BITS.get(text, text),
        choices=WEIGHT_FORMATS,
        help="the same for the output matrix alone; 4 and 8 are int4 and int8",
    )
    add("--kv", choices=KV_FORMATS, help="format of cached keys and values")
    add("--threads", type=int, metavar="N", help="threads (default: those that the machine and its container allow)")
    add(
        "--isa",
        metavar="NAME",
        help="instruction set: scalar, avx2, avx2_vnni, avx512_vnni (default: the best there is)",
    )
    return group


def add_executor_arguments(parser: argparse.ArgumentParser) -> None:
    """What runs the model."""
    group = parser.add_argument_group("executor")
    add = _adder(group)
    add(
        "--executor",
        choices=("native", "torch", "reference"),
        help="what computes the model: our kernels (default), PyTorch, or the plain definition of every operation",
    )
    add("--device", metavar="NAME", help="with --executor torch: cpu (default), cuda or cuda:N")


def executor_choice(args: argparse.Namespace) -> dict[str, str]:
    """What the flags of ``add_executor_arguments`` say, as ``LLM`` takes it."""
    return _given(args, {"executor": "executor", "device": "device"})


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``SamplingParams``; one that is not given leaves the field's own default."""
    group = parser.add_argument_group("sampling")
    add = _adder(group)
    add("--max-tokens", type=int, metavar="N", help="longest answer (default: to the end of the context)")
    add("--min-tokens", type=int, metavar="N", help="no end before so many tokens")
    add("--temperature", type=float, metavar="T", help="0 takes the most likely token (default)")
    add("--top-k", type=int, metavar="K", help="draw among the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that make up this probability")
    add("--min-p", type=float, metavar="P", help="draw among tokens at least this likely relative to the likeliest")
    add("--repetition-penalty", type=float, metavar="X", help="above 1 makes tokens that occurred less likely")
    add("--presence-penalty", type=float, metavar="X", help="subtracted from the logit of a token that was generated")
    add("--frequency-penalty", type=float, metavar="X", help="subtracted for each time that a token was generated")
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=X",
        help="added to the logit of a token id; may be repeated",
    )
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--n", type=int, metavar="N", help="number of answers")
    add("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    add("--stop-token-id", type=int, action="append", metavar="ID", help="token that ends the answer; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the model's own end")
    add("--logprobs", type=int, metavar="K", help="with --json: log-probabilities of each token and its K best rivals")
    add("--prompt-logprobs", type=int, metavar="K", help="with --json: the same for the prompt's tokens")
    add(
        "--structure",
        type=_structure,
        metavar="KIND[=SOURCE]",
        help="what the answer must be: json_object, json_schema=SCHEMA, regex=EXPRESSION, choice=LIST or grammar=LARK; "
        "@FILE for what stands in a file",
    )


def engine_config(args: argparse.Namespace, **fields: Any) -> EngineConfig:
    """The configuration that the flags describe; ``fields`` are a command's own defaults."""
    return EngineConfig(**{**fields, **_given(args, ENGINE_FIELDS)})


def sampling_params(args: argparse.Namespace, **fields: Any) -> SamplingParams:
    """The parameters that the flags describe; ``fields`` are a command's own defaults. Raises ``ParameterError``."""
    from paceline.params import SamplingParams

    given = _given(args, SAMPLING_FIELDS)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**{**fields, **given})


def byte_size(text: str) -> int:
    """Bytes of a size such as ``800000``, ``512M`` or ``1.5G`` (powers of 1024)."""
    number, unit = text.strip(), ""
    if number and number[-1].lower() in _SIZES:
        number, unit = number[:-1], number[-1].lower()
    try:
        size = float(number) * _SIZES[unit]
        if size < 1:
            raise ValueError
        return int(size)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, or a number with K, M or G") from None


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _adder(group: Any) -> Any:
    """``group.add_argument`` for flags that leave no attribute when they are not given."""

    def add(*names: str, **options: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **options)

    return add


def _given(args: argparse.Namespace, fields: dict[str, str]) -> dict[str, Any]:
    return {field: getattr(args, flag) for flag, field in fields.items() if hasattr(args, flag)}


def _structure(text: str) -> Structure:
    from paceline.errors import ParameterError
    from paceline.params import Structure

    kind, _, source = text.partition("=")
    try:
        if source.startswith("@"):
            source = Path(source[1:]).read_text("utf-8")
        return Structure(kind, source)  # type: ignore[arg-type]  # it checks the kind itself
    except (ParameterError, OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, such as 198=-5") from None
