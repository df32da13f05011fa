"""A deterministic executor without a model: a token is a function of the tokens that are really in the pages.

It stores token ids in a page array as the real ones store keys and values, and reads them back through the page table,
so that every error in page bookkeeping changes the output. Its logits are pseudo-random in the hash of what it reads;
choosing a token honours all of ``SAMPLE_ROW`` but top_k, top_p and min_p, simply and slowly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, ModelConfig, RopeConfig
from paceline.executors.base import StepPlan, StepResult
from paceline.sampling.distribution import allowed_tokens, probabilities
from paceline.sampling.rows import SampledRows, SampleRows


def tiny_model(vocab_size: int = 97, context_length: int = 512, sliding_window: int | None = None) -> ModelConfig:
    """A model configuration of no model."""
    return ModelConfig(
        architecture="llama",
        num_layers=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=vocab_size,
        context_length=context_length,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0, dim=32),
        tie_embeddings=True,
        sliding_window=sliding_window,
    )


def fake_logits(tokens: Sequence[int], vocab_size: int) -> NDArray[np.float32]:
    """Logits [vocab] after ``tokens``."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(vocab_size).astype(np.float32)


def fake_hidden(tokens: Sequence[int], width: int) -> NDArray[np.float32]:
    """Hidden state [width] of the last of ``tokens``: the last three, then zeros; unlike logits it costs little."""
    hidden = np.zeros(width, np.float32)
    hidden[: len(tokens[-3:])] = tokens[:-4:-1]
    return hidden


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """log-softmax in f32."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)


class FakeExecutor:
    """See the module. ``log``: (rows, sequences, outputs) of each step; a row with token ``fail_when`` raises."""

    def __init__(
        self,
        *,
        model: ModelConfig | None = None,
        num_pages: int = 64,
        max_rows: int = 256,
        max_outputs: int = 64,
        fail_when: int | None = None,
    ) -> None:
        self.model = model or tiny_model()
        self.num_pages = num_pages
        self.max_rows = max_rows
        self.max_outputs = max_outputs
        self.fail_when = fail_when
        self.log: list[tuple[int, int, int]] = []
        self._pages = np.full((num_pages, PAGE_TOKENS), -1, np.int64)
        self.pages = self._pages.view(np.uint8)
        self._logits = np.zeros((0, self.model.vocab_size), np.float32)
        self._hidden = np.zeros((0, self.model.hidden_size), np.float32)

    def run(self, plan: StepPlan) -> StepResult:
        """Checks the plan's contract, writes its tokens into pages, and reads contexts back from there."""
        self._check(plan)
        if self.fail_when is not None and self.fail_when in plan.tokens:
            raise RuntimeError(f"the executor met token {self.fail_when}")
        for source, destination in plan.page_copies.tolist():
            self._pages[destination] = self._pages[source]
        sequence_of = np.repeat(np.arange(len(plan.row_starts) - 1), np.diff(plan.row_starts))
        for row, sequence in enumerate(sequence_of):
            page, offset = divmod(int(plan.positions[row]), PAGE_TOKENS)
            self._pages[plan.page_table[sequence, page], offset] = plan.tokens[row]
        for row, sequence in plan.kv_writes.tolist():
            page, offset = divmod(int(plan.positions[row]), PAGE_TOKENS)
            self._pages[plan.page_table[sequence, page], offset] = plan.tokens[row]
        vocab = self.model.vocab_size
        self._logits = np.zeros((len(plan.logit_rows), vocab), np.float32)
        for output, row in enumerate(plan.logit_rows.tolist()):
            length = int(plan.positions[row]) + 1
            pages = plan.page_table[sequence_of[row], : -(-length // PAGE_TOKENS)]
            oldest = max(0, length - (self.model.sliding_window or length))
            self._logits[output] = fake_logits(self._pages[pages].reshape(-1)[oldest:length].tolist(), vocab)
        self._hidden = np.stack([self._hidden_of(plan, row, sequence) for row, sequence in enumerate(sequence_of)])
        self.log.append((len(plan.tokens), len(plan.row_starts) - 1, len(plan.logit_rows)))
        return StepResult(sample(plan.samples, self._logits))

    def logits(self) -> NDArray[np.float32]:
        """Logits [outputs, vocab] of the last step."""
        return self._logits

    def hidden(self) -> NDArray[np.float32]:
        """Rows of ``fake_hidden``."""
        return self._hidden

    def _hidden_of(self, plan: StepPlan, row: int, sequence: int) -> NDArray[np.float32]:
        length = int(plan.positions[row]) + 1
        tokens = self._pages[plan.page_table[sequence, : -(-length // PAGE_TOKENS)]].reshape(-1)[:length].tolist()
        return fake_hidden(tokens, self.model.hidden_size)

    def probabilities(self, samples: SampleRows, outputs: Sequence[int]) -> NDArray[np.float64]:
        """The distributions by their definition, filters included."""
        found = [probabilities(self._logits[output], samples.rows[output], samples) for output in outputs]
        return np.array(found).reshape(-1, self.model.vocab_size)

    def score(self, samples: SampleRows, outputs: Sequence[int]) -> SampledRows:
        """What the records choose and report at these outputs of the last step."""
        return sample(samples, self._logits[list(outputs)])

    def path(self) -> dict[str, str | int]:
        """What runs: nothing real."""
        return {"isa": "fake", "threads": 1, "weights": "none", "kv_dtype": "none"}

    def _check(self, plan: StepPlan) -> None:
        rows, outputs = len(plan.tokens), len(plan.logit_rows)
        assert 0 < rows <= self.max_rows
        assert outputs <= self.max_outputs
        assert plan.tokens.dtype == plan.positions.dtype == plan.row_starts.dtype == plan.page_table.dtype == np.int32
        assert plan.tokens.shape == plan.positions.shape
        assert plan.row_starts[0] == 0
        assert plan.row_starts[-1] == rows
        assert np.all(np.diff(plan.row_starts) > 0), "a sequence without rows"
        assert np.all(np.diff(plan.logit_rows) > 0), "outputs out of order"
        assert np.all(plan.logit_rows < rows)
        assert len(plan.samples.rows) == outputs
        written: set[int] = set()
        for sequence in range(len(plan.row_starts) - 1):
            positions = plan.positions[plan.row_starts[sequence] : plan.row_starts[sequence + 1]]
            assert np.all(np.diff(positions) == 1), "rows of a sequence must be consecutive"
            used = plan.page_table[sequence, : positions[-1] // PAGE_TOKENS + 1].tolist()
            if self.model.sliding_window is None:  # else entries before the window are stale
                assert len(set(used)) == len(used)
            assert all(0 <= page < self.num_pages for page in used)
            own = set(used[positions[0] // PAGE_TOKENS :])
            assert not own & written, "two sequences write one page"
            written |= own
        for output, row in enumerate(plan.logit_rows.tolist()):
            assert plan.samples.rows["position"][output] == plan.positions[row] + 1


def sample(samples: SampleRows, logits: NDArray[np.float32]) -> SampledRows:
    """Chooses the tokens of a step, one output after the other."""
    count, vocab = logits.shape
    top = max(0, int(samples.rows["num_logprobs"].max(initial=0)))
    tokens = np.zeros(count, np.int32)
    logprobs = np.full(count, np.nan, np.float32)
    top_tokens = np.full((count, top), -1, np.int32)
    top_logprobs = np.full((count, top), np.nan, np.float32)
    for output, row in enumerate(samples.rows):
        x = logits[output].astype(np.float64)
        bias = slice(row["bias_start"], row["bias_start"] + row["bias_len"])
        x[samples.bias_tokens[bias]] += samples.bias_values[bias]
        x[samples.banned_tokens[row["banned_start"] : row["banned_start"] + row["banned_len"]]] = -np.inf
        if row["mask"] >= 0:
            x[~allowed_tokens(samples.mask_words[row["mask"]], vocab)] = -np.inf
        counts = slice(row["counts_start"], row["counts_start"] + row["counts_len"])
        ids, values = samples.count_tokens[counts], samples.count_values[counts]
        assert len(set(ids.tolist())) == len(ids)
        penalty = float(row["repetition_penalty"])
        x[ids] = np.where(x[ids] > 0, x[ids] / penalty, x[ids] * penalty)
        x[ids] -= row["frequency_penalty"] * values + row["presence_penalty"] * (values > 0)
        if row["temperature"] > 0:
            noise = np.random.default_rng([int(row["seed"]), int(row["position"])]).gumbel(size=vocab)
            x = x / row["temperature"] + noise
        tokens[output] = row["forced"] if row["forced"] >= 0 else int(np.argmax(x))
        if row["num_logprobs"] >= 0:
            all_logprobs = log_softmax(logits[output])
            logprobs[output] = all_logprobs[tokens[output]]
            best = np.argsort(-all_logprobs, kind="stable")[: row["num_logprobs"]]
            top_tokens[output, : len(best)] = best
            top_logprobs[output, : len(best)] = all_logprobs[best]
    return SampledRows(tokens, logprobs, top_tokens, top_logprobs)


class FakeTokenizer:
    """One token a byte, then token ``vocab_size - 1`` as end of text; ids past the bytes stand for two letters."""

    def __init__(self, vocab_size: int = 97, *, table: Sequence[bytes] | None = None) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = (vocab_size - 1,)
        self.bos_token_id = None
        self.add_bos = False
        if table is None:
            # Letters and blanks first, so that small vocabularies give text that can hold stop strings.
            table = [bytes([32 + i % 95]) for i in range(vocab_size - 1)] + [b""]
        assert len(table) == vocab_size
        self._table = list(table)

    def token_bytes(self, token_id: int, include_special: bool = False) -> bytes:
        """The bytes of a token; the end of text is spelled "<end>"."""
        return b"<end>" if include_special and token_id in self.eos_token_ids else self._table[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The first token of each byte."""
        return [self._table.index(bytes([byte])) for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def reference_tokens(
    prompt: Sequence[int],
    count: int,
    *,
    vocab_size: int = 97,
    stop_ids: Sequence[int] = (),
    window: int | None = None,
) -> list[int]:
    """The greedy answer by the definition: no pages, no steps, no engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(fake_logits(tokens[-(window or len(tokens)) :], vocab_size))))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
