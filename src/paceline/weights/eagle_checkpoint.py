"""An EAGLE head on disk: a directory with config.json and model.safetensors, for one target model.

config.json, an object with the keys
    architectures          ["PacelineEagleHead"]
    draft_vocab_size       tokens that the head knows
    hidden_size            the target's
    intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps    of the layer, as in Llama's;
                           the third is the second unless given, head_dim hidden_size / num_attention_heads
    vocab_size             optional: the target's
    input_norms            optional, false: both inputs are normed first
    rope_theta, rope_scaling or rope_parameters, max_position_embeddings    optional: the target's
    num_hidden_layers      optional: 1

model.safetensors, F32, F16 or BF16, matrices as (outputs, inputs)
    fc.weight              [hidden, 2 hidden]: the first half of its inputs is the token's embedding, the second the
                           features
    layers.0.*             the layer, named as in Hugging Face's Llama without "model."
    norm.weight            the norm before the head
    lm_head.weight         [draft_vocab, hidden]
    d2t                    I64 [draft_vocab]: token i of the head is token i + d2t[i] of the target, as in EAGLE-3
    embed_tokens.weight    optional: the target's
    embed_norm.weight, feature_norm.weight    [hidden], with input_norms
    t2d                    optional, ignored: it follows from d2t

Source: Li et al. 2024 (EAGLE, 2401.15077) and 2025 (EAGLE-3, 2503.01840), for names and conventions.
Departures: the published heads of either have other layers (see models/eagle.py), so their directories are refused.
Checked by: tests/unit/test_eagle_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import ModelConfig
from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.registry import config_from_json
from paceline.weights.inventory import check_inventory
from paceline.weights.mapped_file import map_file
from paceline.weights.raw import BLOCK_KINDS, Checkpoint, RawTensor, TensorHeader
from paceline.weights.safetensors import DTYPES, canonical_name, read_json
from paceline.weights.safetensors_header import Entry, read_entries

ARCHITECTURE = "PacelineEagleHead"
EMBEDDING, FC, IDS = "token_embd.weight", "fc.weight", "d2t"
FC_HALVES = ("fc_embed.weight", "fc_feature.weight")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
IGNORED = ("t2d",)


class EagleCheckpoint:
    """A head for ``target``, memory-mapped; implements ``raw.Checkpoint``.

    ``target_ids`` [draft_vocab] i32 are the target's ids of the tokens that the head knows, each once.
    """

    def __init__(self, path: Path, target: Checkpoint) -> None:
        """Reads config.json, the header and d2t. Raises CheckpointError or UnsupportedError, naming what is wrong."""
        self._path = path
        self._target = target
        self.interleaved_rope = False
        self.config = config_of_head(path / "config.json", read_json(path / "config.json"), target.config)
        self._file = path / "model.safetensors"
        self._buffer = map_file(self._file)
        entries = read_entries(self._file, self._buffer)
        self.target_ids = self._read_ids(entries.pop(IDS, None))
        self._entries = {_canonical(name): entry for name, entry in entries.items() if name not in IGNORED}
        self._check_dtypes()
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        shapes.setdefault(EMBEDDING, target.header(EMBEDDING).shape)
        hidden = self.config.hidden_size
        if shapes.pop(FC, None) != (hidden, 2 * hidden):
            problem = f"missing, or its shape is not {(hidden, 2 * hidden)}"
            raise CheckpointError(self._file, problem, tensor=FC)
        check_inventory(self._file, self.config, shapes | dict.fromkeys(FC_HALVES, (hidden, hidden)))

    @property
    def has_embeddings(self) -> bool:
        """Whether they are its own and not the target's."""
        return EMBEDDING in self._entries

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self._path / "config.json", self._file)

    def names(self) -> tuple[str, ...]:
        own = (name for name in self._entries if name not in (FC, EMBEDDING))
        return (EMBEDDING, *FC_HALVES, *own)

    def header(self, name: str) -> TensorHeader:
        if name == EMBEDDING and name not in self._entries:
            return self._target.header(name)
        hidden = self.config.hidden_size
        entry = self._entry(FC if name in FC_HALVES else name)
        return TensorHeader((hidden, hidden) if name in FC_HALVES else entry.shape, entry.dtype)

    def tensor(self, name: str) -> RawTensor:
        if name == EMBEDDING and name not in self._entries:
            return self._target.tensor(name)
        if name in FC_HALVES:
            return self._half(name)
        entry = self._entry(name)
        return RawTensor(name, entry.shape, entry.dtype, self._data(entry))

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(self._file, "missing", tensor=name)
        return self._entries[name]

    def _half(self, name: str) -> RawTensor:
        """The columns of fc.weight that one input meets, copied."""
        entry = self._entries[FC]
        hidden = self.config.hidden_size
        halves = self._data(entry).reshape(hidden, 2, hidden * BLOCK_KINDS[entry.dtype][1])
        half = np.ascontiguousarray(halves[:, FC_HALVES.index(name)])
        return RawTensor(name, (hidden, hidden), entry.dtype, half.reshape(-1))

    def _data(self, entry: Entry) -> NDArray[np.uint8]:
        return np.frombuffer(self._buffer, np.uint8, entry.num_bytes, entry.start)

    def _read_ids(self, entry: Entry | None) -> NDArray[np.int32]:
        count, vocab_size = self.config.num_logits, self.config.vocab_size
        if entry is None:
            raise CheckpointError(self._file, "missing", tensor=IDS)
        if entry.dtype != "I64" or entry.shape != (count,) or entry.num_bytes != 8 * count:
            problem = f"is {entry.dtype} {entry.shape}, expected I64 {(count,)} (draft_vocab_size)"
            raise CheckpointError(self._file, problem, tensor=IDS)
        ids = np.arange(count) + self._data(entry).view("<i8")
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            at = int(outside.argmax())
            problem = f"token {at} of the head would be token {ids[at]} of the target, which has {vocab_size}"
            raise CheckpointError(self._file, problem, tensor=IDS)
        if len(np.unique(ids)) < count:
            raise CheckpointError(self._file, "two tokens of the head are one token of the target", tensor=IDS)
        target_ids: NDArray[np.int32] = ids.astype(np.int32)
        return target_ids

    def _check_dtypes(self) -> None:
        for name, entry in self._entries.items():
            if entry.dtype not in DTYPES:
                supported = ", ".join(DTYPES)
                raise UnsupportedError(f"{self._file}: tensor {name!r} is {entry.dtype}; Paceline reads {supported}")


def config_of_head(path: Path, values: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """The configuration in the config.json of a head for ``target``; ``path`` is only for errors, which name the key.

    Raises CheckpointError for a missing or impossible value, UnsupportedError for another architecture.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or names[:1] != [ARCHITECTURE]:
        raise UnsupportedError(f"{path}: architectures is {names!r}, expected [{ARCHITECTURE!r}]")
    given = {"vocab_size": target.vocab_size, "max_position_embeddings": target.context_length, "num_hidden_layers": 1}
    read = config_from_json(path, {**given, **values, "architectures": ["LlamaForCausalLM"]})
    wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_layers": 1}
    for key, value in wanted.items():
        if getattr(read, key) != value:
            reason = "a head has one layer" if key == "num_layers" else f"the target has {value}"
            key = "num_hidden_layers" if key == "num_layers" else key
            raise CheckpointError(path, f"{key} is {values[key]!r}, but {reason}")
    rope = read.rope
    if not any(values.get(key) for key in ROPE_KEYS):
        rope = target.rope
        if read.head_dim != target.head_dim:
            problem = f"rope_theta is missing, and head_dim is {read.head_dim} where the target has {target.head_dim}"
            raise CheckpointError(path, problem)
    count = values.get("draft_vocab_size")
    if type(count) is not int or not 1 <= count <= target.vocab_size:
        limit = f"a whole number between 1 and {target.vocab_size}, the target's vocabulary"
        raise CheckpointError(path, f"draft_vocab_size is {count!r}, expected {limit}")
    input_norms = values.get("input_norms", False)
    if not isinstance(input_norms, bool):
        raise CheckpointError(path, f"input_norms is {input_norms!r}, expected true or false")
    return replace(
        read,
        architecture="eagle",
        rope=rope,
        context_length=target.context_length,
        tie_embeddings=False,
        draft_vocab_size=count,
        input_norms=input_norms,
    )


def _canonical(name: str) -> str:
    """The name that the graph uses; the name itself where it has none."""
    for known in (name, f"model.{name}"):
        canonical = canonical_name(known)
        if canonical != known:
            return canonical
    return name
