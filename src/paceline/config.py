"""Frozen descriptions of a model, of an engine, and of the machine they run on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ParameterError

WeightFormat = Literal["native", "f32", "bf16", "int8", "int4"]
KVFormat = Literal["f16", "bf16", "f32", "int8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("native", "f32", "bf16", "int8", "int4")
Activation = Literal["silu", "gelu_tanh", "swiglu_oai"]
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
    ``rope_freqs.weight``); "yarn" (Peng et al. 2309.00071) divides by ``factor`` the frequencies that turn fewer than
    ``beta_slow`` times in ``original_context``, none that turn more than ``beta_fast`` times, and interpolates between
    the two pairs of a head, taken whole with ``truncate``; "longrope" (Ding et al. 2402.13753) is "factors" with
    ``factors`` while at most ``original_context`` tokens are served and ``long_factors`` beyond
    (``ModelConfig.at_context``). ``attention_factor`` multiplies rotated queries and keys.
    """

    kind: Literal["linear", "llama3", "factors", "yarn", "longrope"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base ``theta``, the ``dim`` leading components of each head that rotate, optional
    scaling.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def at_context(self, context_length: int) -> RopeConfig:
        """The same with "longrope" as the "factors" of so long a context."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        factors = scaling.factors if context_length <= scaling.original_context else scaling.long_factors
        return replace(self, scaling=replace(scaling, kind="factors", factors=factors, long_factors=()))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each feed-forward network: of ``num_experts`` networks of ``width`` a token goes
    through the ``num_chosen`` that its router scores highest.

    Their weights are a softmax over the chosen scores with ``normalise``, over all scores without. ``biases``: router
    and experts have biases. ``dense_layers`` have one network of ``ModelConfig.intermediate_size`` instead.
    """

    num_experts: int
    num_chosen: int
    width: int
    normalise: bool = True
    biases: bool = False
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder-only model is made of; the same for every file format.

    ``sliding_window`` is the number of latest positions (the own one included) that a query sees, None for all;
    ``windowed_layers`` says which layers have it (empty: all), ``local_rope`` how these rotate where that differs,
    ``unrotated_layers`` which layers do not rotate. ``attention_scale`` multiplies scores (None: 1 / sqrt(head_dim)),
    a softcap c turns x into c tanh(x / c), ``residual_scale`` multiplies what a block adds to the residual stream.
    ``qk_norm``: queries and keys are normed before they rotate. Only "eagle" has ``draft_vocab_size``, the tokens that
    its trimmed head knows, and may have ``input_norms``.
    """

    architecture: str
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
    activation: Activation = "silu"
    windowed_layers: tuple[bool, ...] = ()
    local_rope: RopeConfig | None = None
    unrotated_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    output_bias: bool = False
    attention_sinks: bool = False
    experts: Experts | None = None

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

    @property
    def query_scale(self) -> float:
        """What queries are multiplied with, so that scores need no scale of their own."""
        return 1.0 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale

    @property
    def kv_window(self) -> int | None:
        """The window if every layer has it: then, and only then, pages that fall out of it are needed no more."""
        return self.sliding_window if all(self.windowed_layers) else None

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, None where it sees everything."""
        return None if self.windowed_layers and not self.windowed_layers[layer] else self.sliding_window

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer, None where it has one network for all tokens."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def rope_of(self, layer: int) -> RopeConfig | None:
        """How a layer rotates queries and keys, None where it does not."""
        if layer in self.unrotated_layers:
            return None
        is_local = self.local_rope is not None and self.window_of(layer) is not None
        return self.local_rope if is_local else self.rope

    def at_context(self, context_length: int) -> ModelConfig:
        """The same for a service of at most so many tokens a sequence: RoPE factors that depend on it are chosen."""
        local = None if self.local_rope is None else self.local_rope.at_context(context_length)
        return replace(self, rope=self.rope.at_context(context_length), local_rope=local)


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
        embeddings are the head; others stay as the file holds them, since a step reads only a few of their rows. So do
        routers: they are small, and what they choose must not hang on a rounding.
        """
        if (tensor == "token_embd.weight" and not tied_embeddings) or tensor.endswith(".ffn_gate_inp.weight"):
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
