"""Frozen descriptions of a model, of an engine, and of the machine they run on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ParameterError

WeightFormat = Literal["native", "f32", "bf16", "int8", "int4"]
KVFormat = Literal["f16", "bf16", "f32", "int8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("native", "f32", "bf16", "int8", "int4")
Acceptance = Literal["coupled", "exact"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "exact")
KV_FORMATS: tuple[KVFormat, ...] = ("f16", "bf16", "f32", "int8")

PAGE_TOKENS = 32
"""Tokens in one page of the KV cache: two blocks of 16, the number of lanes in the attention kernel."""

SPLIT_TOKENS = 128
"""Keys that one partial softmax of the attention kernel covers; it reads from the start of the split where a row's
sliding window begins."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind`` "linear" divides positions by ``factor``; "llama3" divides only low frequencies by ``factor``, leaves high
    ones, and interpolates between wavelengths ``original_context / low_freq_factor`` and ``original_context /
    high_freq_factor``; "factors" divides frequency i by ``factors[i]`` (the form a GGUF file stores in
    ``rope_freqs.weight``).
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base ``theta``, the ``dim`` leading components of each head that rotate, optional
    scaling.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder-only model is made of; the same for every file format.

    ``sliding_window`` is the number of latest positions (the own one included) that a query sees, None for all. Only
    "eagle" has ``draft_vocab_size``, the tokens that its trimmed head knows, and may have ``input_norms``.
    """

    architecture: Literal["llama", "qwen2", "qwen3", "eagle"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    draft_vocab_size: int | None = None
    input_norms: bool = False

    @property
    def num_logits(self) -> int:
        """Tokens that the head chooses from."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def q_size(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Machine:
    """What the engine may use of this machine.

    ``num_threads`` respects affinity and the cgroup quota; ``available_bytes`` respects the cgroup limit.
    """

    isa: str
    num_threads: int
    available_bytes: int


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. ``None`` means "decide from the machine"; ``resolve`` fills in threads and ISA.

    ``token_budget`` bounds the rows of one step (so it is the prefill chunk); ``max_batch`` bounds the requests that
    run together; ``max_queue`` bounds those that wait (None: no bound). ``max_gap_ms`` bounds the time between two
    tokens of a streamed answer while another prefills: chunks are made small enough for it, less so when several wait
    (None: no bound).

    ``prefix_cache`` keeps the keys and values of finished requests for later ones that begin with the same tokens.
    ``kv_dir`` keeps them on disk as well, in at most ``kv_dir_bytes``, so that they outlive the program.

    ``speculate`` names who drafts tokens that a step then verifies: "off", "suffix", "ngram", "forced" (by the answer's
    structure), "draft:MODEL" (or "draft:self:int4": the model itself with other weights), "eagle:DIR", several joined
    by "+", or "auto": "forced+suffix" (None: auto for a model that is loaded by name). ``acceptance`` "coupled" draws
    each token as without drafts, so that the same seed gives the same answer; "exact" accepts by chance, which keeps
    the law of the answer and accepts more. ``draft_tokens`` has every step verify so many (None: as many as pay, which
    may be none).
    """

    weights: WeightFormat = "native"
    head_bits: WeightFormat | None = None
    kv_dtype: KVFormat = "f16"
    context_length: int | None = None
    max_batch: int = 64
    token_budget: int = 256
    kv_memory_bytes: int | None = None
    num_threads: int | None = None
    isa: str | None = None
    seed: int = 0
    prefix_cache: bool = True
    kv_dir: str | None = None
    kv_dir_bytes: int = 4 * 2**30
    max_queue: int | None = None
    max_gap_ms: float | None = 100.0
    speculate: str | None = None
    acceptance: Acceptance = "coupled"
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_FORMATS:
            raise ParameterError("weights", self.weights, f"one of {', '.join(WEIGHT_FORMATS)}")
        if self.head_bits is not None and self.head_bits not in WEIGHT_FORMATS:
            raise ParameterError("head_bits", self.head_bits, f"one of {', '.join(WEIGHT_FORMATS)}")
        if self.kv_dtype not in KV_FORMATS:
            raise ParameterError("kv_dtype", self.kv_dtype, f"one of {', '.join(KV_FORMATS)}")
        _check_integer("context_length", self.context_length, 1, 2**30, optional=True)
        _check_integer("kv_memory_bytes", self.kv_memory_bytes, 1, 2**62, optional=True)
        _check_integer("num_threads", self.num_threads, 1, 1024, optional=True)
        _check_integer("max_batch", self.max_batch, 1, 1024)
        _check_integer("token_budget", self.token_budget, 1, 8192)
        _check_integer("seed", self.seed, 0, 2**64 - 1)
        _check_integer("kv_dir_bytes", self.kv_dir_bytes, 1, 2**62)
        _check_integer("max_queue", self.max_queue, 1, 2**30, optional=True)
        gap = self.max_gap_ms
        if gap is not None and not (isinstance(gap, (int, float)) and not isinstance(gap, bool) and 0 < gap < math.inf):
            raise ParameterError("max_gap_ms", gap, "a number of milliseconds above 0")
        if self.acceptance not in ACCEPTANCES:
            raise ParameterError("acceptance", self.acceptance, f"one of {', '.join(ACCEPTANCES)}")
        _check_integer("draft_tokens", self.draft_tokens, 1, 64, optional=True)
        if self.speculate is not None:
            parse_speculate(self.speculate)
        if self.speculate == "off" and self.draft_tokens is not None:
            raise ParameterError("draft_tokens", self.draft_tokens, "None with speculate off: nobody drafts")
        if not isinstance(self.prefix_cache, bool):
            raise ParameterError("prefix_cache", self.prefix_cache, "True or False")
        path = self.kv_dir
        if path is not None and not (isinstance(path, str) and path and "\0" not in path):
            raise ParameterError("kv_dir", path, "the path of a directory")
        if path is not None and not self.prefix_cache:
            raise ParameterError("kv_dir", self.kv_dir, "None without prefix_cache: it is the cache that it keeps")
        if not self.max_batch <= self.token_budget <= 8192:
            raise ParameterError("token_budget", self.token_budget, f"between max_batch ({self.max_batch}) and 8192")

    def weights_of(self, tensor: str, *, tied_embeddings: bool) -> WeightFormat:
        """The format of a matrix by its canonical name.

        The LM head takes ``head_bits`` when given; int4 weights keep an int8 head, which costs quality less. Tied
        embeddings are the head; others stay as the file holds them, since a step reads only a few of their rows.
        """
        if tensor == "token_embd.weight" and not tied_embeddings:
            return "native"
        if tensor in ("token_embd.weight", "output.weight"):
            return self.head_bits or ("int8" if self.weights == "int4" else self.weights)
        return self.weights

    @property
    def max_outputs(self) -> int:
        """Outputs of one step: a token of each running request, and room for drafts (the largest has 64 tokens) and for
        the log-probabilities of a prompt's chunk.
        """
        return max(self.max_batch, min(65, self.token_budget))

    def resolve(self, machine: Machine) -> EngineConfig:
        """A copy in which threads and ISA are those of ``machine`` wherever they were left open."""
        return replace(self, num_threads=self.num_threads or machine.num_threads, isa=self.isa or machine.isa)


@dataclass(frozen=True)
class DrafterName:
    """One drafter of ``EngineConfig.speculate``: its kind, and what it is made from."""

    kind: Literal["suffix", "ngram", "forced", "draft", "eagle"]
    source: str = ""


def parse_speculate(text: str) -> tuple[DrafterName, ...]:
    """The drafters that ``text`` names, in order; none for "off". Raises ``ParameterError``."""
    allowed = (
        "off, auto, suffix, ngram, forced, draft:MODEL, draft:self:WEIGHTS, eagle:DIR, or several of these joined by +"
    )
    if not isinstance(text, str):
        raise ParameterError("speculate", text, allowed)
    if text == "off":
        return ()
    if text == "auto":
        return (DrafterName("forced"), DrafterName("suffix"))
    names = []
    for part in text.split("+"):
        kind, _, source = part.partition(":")
        if kind in ("suffix", "ngram", "forced") and not source:
            names.append(DrafterName(kind))  # type: ignore[arg-type]  # checked on the line before
        elif kind in ("draft", "eagle") and source:
            names.append(DrafterName(kind, source))  # type: ignore[arg-type]
        else:
            raise ParameterError("speculate", text, allowed)
    if len(set(names)) < len(names):
        raise ParameterError("speculate", text, "each drafter once")
    return tuple(names)


def _check_integer(field: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(field, value, f"a whole number between {low} and {high}")
