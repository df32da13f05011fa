"""`paceline verify` finds nothing where nothing is wrong, and each planted bug in the cell and at the position where it
is.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from byte_llm import VOCAB
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model
from numpy.typing import NDArray
from tiny_models import tiny_checkpoint, tiny_config

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.engine import engine
from paceline.errors import ParameterError
from paceline.executors.base import Executor, StepPlan, StepResult
from paceline.executors.reference import ReferenceExecutor
from paceline.kv.manager import KVManager, Opened
from paceline.llm import LLM
from paceline.measure import cells as matrix
from paceline.measure.cells import SHARED_TOKENS, Host
from paceline.measure.verification import ORDER, Effort, Proof, Result, verify
from paceline.measure.workbench import Load
from paceline.ops.graph import Node
from paceline.ops.reference import Step, Table
from paceline.speculate.forced import ForcedDrafter

HOST = Host(num_threads=2, isas=(), kv_formats=(), drafts_itself=False)
EFFORT = Effort(num_long=70, num_text=40, num_new=6)
TOKENIZER = FakeTokenizer(VOCAB, table=[bytes([byte]) for byte in range(256)] + [b""])


class PathExecutor(FakeExecutor):
    """A fake that runs under any configuration, and says so."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            model=tiny_model(VOCAB, 512), num_pages=256, max_rows=config.token_budget, max_outputs=config.max_outputs
        )
        self.config = config

    def path(self) -> dict[str, str | int]:
        threads = self.config.num_threads or 0
        return {"isa": self.config.isa or "best", "threads": threads, "kv_dtype": self.config.kv_dtype, "weights": "no"}


@dataclass(frozen=True)
class StoredPage:
    """A page on the disk that is none."""

    entry: int
    parent: int | None
    domain: bytes
    tokens: bytes
    page: NDArray[np.uint8]


class MemoryStore:
    """A store over a list of pages, which outlives it as files do."""

    def __init__(self, pages: list[StoredPage]) -> None:
        self.pages = pages

    def entries(self) -> Iterator[StoredPage]:
        """All pages."""
        return iter(self.pages)

    def put(self, parent: int | None, domain: bytes, tokens: bytes, page: NDArray[np.uint8]) -> int | None:
        """Keeps a copy."""
        self.pages.append(StoredPage(len(self.pages), parent, domain, tokens, page.copy()))
        return len(self.pages) - 1

    def read(self, entry: int, into: NDArray[np.uint8]) -> bool:
        """Copies a page back."""
        into[:] = self.pages[entry].page
        return True

    def touch(self, entry: int) -> None:
        """Nothing is ever evicted."""

    def evicted(self) -> list[int]:
        """Nothing."""
        return []


def loading(make: Callable[[EngineConfig], Executor], store: type[MemoryStore] = MemoryStore) -> Load:
    """Loads what ``make`` makes; directories are lists in memory."""
    directories: dict[str, list[StoredPage]] = {}

    def load(config: EngineConfig, wrap: Callable[[Executor], Executor]) -> LLM:
        executor = wrap(make(config))
        llm = LLM.from_parts(executor, TOKENIZER, config=replace(config, isa=None, kv_dir=None))
        if config.kv_dir is not None:
            pages = directories.setdefault(config.kv_dir, [])
            llm._engine.scheduler.kv.use_store(store(pages), executor.pages)
        return llm

    return load


def prove(make: Callable[[EngineConfig], Executor], *, host: Host = HOST) -> Proof:
    return verify(loading(make), EngineConfig(), host, full=False, effort=EFFORT)


def failed(proof: Proof) -> dict[str, Result]:
    return {result.varied: result for result in proof.results if result.verdict == "FAIL"}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    proof = prove(PathExecutor, host=Host(2, ("scalar",), ("bf16",), drafts_itself=False))
    assert failed(proof) == {}
    assert proof.verdict == "EQUAL"
    assert all(result.num_positions > 0 for result in proof.results)
    assert [name for name, _ in itertools.groupby(result.dimension for result in proof.results)] == list(ORDER[:-1])


def test_nor_in_any_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    table = matrix.dimensions(HOST)
    few = {"batch": [{"batch": 1}, {"batch": 7}], "chunk": [{"chunk": None}, {"chunk": 16}]}
    monkeypatch.setattr(matrix, "dimensions", lambda host: table | few)
    proof = verify(loading(PathExecutor), EngineConfig(), HOST, full=True, effort=EFFORT)
    assert failed(proof) == {}
    assert "cache partly hit · chunk 16 · batch 7 · 2 threads" in {result.varied for result in proof.results}
    assert sum(result.dimension == "crossed" for result in proof.results) > 20


def test_weights_go_before_others_come() -> None:
    """Two copies of a large model would not fit: nothing may hold the executor before."""
    made: list[weakref.ref[Executor]] = []

    def make(config: EngineConfig) -> Executor:
        gc.collect()
        assert [one for one in made if one() is not None] == []
        executor = PathExecutor(config)
        made.append(weakref.ref(executor))
        return executor

    assert failed(prove(make, host=Host(2, ("scalar",), ("bf16",), drafts_itself=False))) == {}
    assert len(made) > 4


# A kernel whose sums depend on the number of rows


class ReferenceInRows(ReferenceExecutor):
    """The reference, with products row by row: BLAS itself sums in another order where there are more rows."""

    @staticmethod
    def apply(node: Node, values: dict[str, Table], step: Step) -> list[Table]:
        """The outputs of one node."""
        if node.op != "linear":
            return ReferenceExecutor.apply(node, values, step)
        return product_in_rows(node, values[node.inputs[0].name], step)

    def path(self) -> dict[str, str | int]:
        """As configured, since nothing here depends on it."""
        return super().path() | {"threads": self._config.num_threads or 0}


class PlantedRows(ReferenceInRows):
    """From five rows on, the two halves of a sum are added up apart."""

    @staticmethod
    def apply(node: Node, values: dict[str, Table], step: Step) -> list[Table]:
        """The outputs of one node."""
        if node.op != "linear" or len(step.tokens) < 5:
            return ReferenceInRows.apply(node, values, step)
        x = values[node.inputs[0].name]
        left = np.arange(x.shape[1]) < x.shape[1] // 2
        halves = [product_in_rows(node, np.where(half, x, np.float32(0)), step) for half in (left, ~left)]
        return [a + b for a, b in zip(*halves, strict=True)]


def product_in_rows(node: Node, x: Table, step: Step) -> list[Table]:
    """The outputs of a linear node, a row at a time."""
    name = node.inputs[0].name
    if len(x) == 0:  # a step without outputs has no rows for the head
        return ReferenceExecutor.apply(node, {name: x}, step)
    rows = [ReferenceExecutor.apply(node, {name: x[at : at + 1]}, step) for at in range(len(x))]
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def reference(kind: type[ReferenceExecutor]) -> Callable[[EngineConfig], Executor]:
    checkpoint = tiny_checkpoint(tiny_config(vocab_size=VOCAB, num_layers=1), seed=2)
    return lambda config: kind.load(checkpoint, config, num_pages=128)


def test_a_real_model_in_plain_numpy_is_equal() -> None:
    assert failed(prove(reference(ReferenceInRows))) == {}


def test_a_sum_that_depends_on_the_number_of_rows_is_caught() -> None:
    found = failed(prove(reference(PlantedRows)))
    assert "chunk 16 · 2 threads" not in found, "a chunk has at least five rows, as the whole prompt has"
    assert "nothing, once more" not in found
    difference = found["batch 7 · 2 threads"].difference
    assert difference is not None
    # All seven prompts come in one step; its rows are summed as those of the long prompt alone. The next step has seven
    # rows or more where the plain path has one.
    assert (difference.request, difference.position) == ("long", EFFORT.num_long + 1)
    assert difference.expected is not None
    assert difference.found is not None
    assert difference.expected.logits != difference.found.logits
    assert difference.expected.logits == pytest.approx(difference.found.logits, abs=1e-3)


# A cache that is off by one


class OffByOne(KVManager):
    """Takes one more token for cached than is there."""

    def open(self, domain: bytes, tokens: bytes, *, limit: int, **options: Any) -> Opened | None:
        """The sequence, wrong by one where a prompt is found in part."""
        opened = super().open(domain, tokens, limit=limit, **options)
        if opened is not None and 0 < opened.num_cached < limit:
            opened.num_cached += 1
        return opened


def test_one_cached_token_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KVManager", OffByOne)
    found = failed(prove(PathExecutor))
    assert {name: result.difference and result.difference.request for name, result in found.items()} == {
        "cache partly hit · 2 threads": "long",
        "prefix shared while it is read · batch 4 · 2 threads": "sharing 2",
        "cache reloaded from disk · 2 threads": "long",
    }
    for result in found.values():
        assert result.difference is not None
        length = SHARED_TOKENS + 5 if "shared" in result.varied else EFFORT.num_long
        assert result.difference.position == length, "the first token after the prompt"
    problem = found["cache partly hit · 2 threads"].problem
    assert problem == "path not taken: 'long' found 47 tokens in the cache, not 46 to 46"


# Stale pages


class Uncopied(PathExecutor):
    """Shares a partly equal page by giving the sequence an empty one: the copy never comes."""

    def run(self, plan: StepPlan) -> StepResult:
        """The step without its copies."""
        return super().run(replace(plan, page_copies=plan.page_copies[:0]))


def test_a_page_that_is_not_copied_is_caught() -> None:
    found = failed(prove(Uncopied))
    assert "planted trees · 2 threads" in found, "a branch begins with the copy of a page"
    cells_of_pages = {name for name, result in found.items() if result.dimension not in ("sampling", "drafts")}
    assert cells_of_pages >= {"cache hit · 2 threads", "cache partly hit · 2 threads"}
    for name in cells_of_pages:
        difference = found[name].difference
        assert difference is not None
        assert (difference.request, difference.position) == ("long", EFFORT.num_long)
        assert found[name].problem is None, "the path was taken"


class Forgetful(PathExecutor):
    """Does not write what is past two pages in small chunks: the pages keep what they held."""

    def run(self, plan: StepPlan) -> StepResult:
        """The step; then what it should not have written is as before."""
        if len(plan.tokens) > 16:
            return super().run(plan)
        before = self._pages.copy()
        result = super().run(plan)
        for sequence, (begin, end) in enumerate(itertools.pairwise(plan.row_starts.tolist())):
            for position in plan.positions[begin:end].tolist():
                if position >= 2 * PAGE_TOKENS and end - begin > 1:
                    at = plan.page_table[sequence, position // PAGE_TOKENS], position % PAGE_TOKENS
                    self._pages[at] = before[at]
        return result


def test_keys_that_are_not_written_are_caught_though_an_earlier_cell_has_left_them() -> None:
    difference = failed(prove(Forgetful))["chunk 16 · 2 threads"].difference
    assert difference is not None
    assert (difference.request, difference.position) == ("long", EFFORT.num_long + 1)


class Uncomputed(KVManager):
    """Under pressure, takes the first page of a request that comes back for the one that it had before."""

    def open(self, domain: bytes, tokens: bytes, *, limit: int, **options: Any) -> Opened | None:
        """The sequence, its first page not to be computed again."""
        opened = super().open(domain, tokens, limit=limit, **options)
        if opened is not None and self.pool.num_pages == 5 and limit >= PAGE_TOKENS:
            opened.num_cached = max(opened.num_cached, PAGE_TOKENS)
        return opened


def test_a_page_that_is_not_computed_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KVManager", Uncomputed)
    found = failed(prove(PathExecutor))
    assert {result.dimension for result in found.values()} == {"memory"}
    difference = found["preempted and resumed in 5 pages · batch 6 · 2 threads"].difference
    assert difference is not None
    assert difference.position is not None
    assert difference.position > PAGE_TOKENS, "what was drawn before the preemption is right"


class Mixed(MemoryStore):
    """Gives back the page that was written before."""

    def read(self, entry: int, into: NDArray[np.uint8]) -> bool:
        """A neighbour's page."""
        return super().read(max(0, entry - 1), into)


def test_a_wrong_page_from_disk_is_caught() -> None:
    proof = verify(loading(PathExecutor, Mixed), EngineConfig(), HOST, full=False, effort=EFFORT)
    assert set(failed(proof)) == {"cache reloaded from disk · 2 threads"}


# Paths that were not taken, and paths that break


class OneThread(PathExecutor):
    """Runs on one thread whatever it is told."""

    def path(self) -> dict[str, str | int]:
        """The truth."""
        return super().path() | {"threads": 1}


def test_a_path_that_was_not_taken_is_no_success() -> None:
    proof = prove(OneThread)
    assert {result.varied for result in proof.results} - set(failed(proof)) == {"nothing, once more"}
    problem = failed(proof)["batch 7 · 2 threads"].problem
    assert problem == "path not taken: threads is 1, not 2"


def test_a_structure_that_forces_no_draft_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForcedDrafter, "_propose", lambda self, context, limit: None)
    (found,) = failed(prove(PathExecutor)).values()
    assert found.varied.startswith("structure ")
    assert found.problem == "path not taken: nothing was drafted"


def test_an_engine_that_never_batches_fails_the_batches() -> None:
    def narrow(config: EngineConfig) -> Executor:
        executor = PathExecutor(config)
        executor.max_outputs = 3
        return executor

    found = failed(prove(narrow))
    assert found["batch 7 · 2 threads"].problem == "path not taken: at most 3 requests ran together"
    assert "batch 2 · 2 threads" not in found


class ReadsApart(PathExecutor):
    """Tells that no sequence was ever spared a read."""

    shared_splits = 0


def test_keys_that_are_shared_and_read_apart_are_no_shared_read() -> None:
    found = failed(prove(ReadsApart))
    assert {name: result.problem for name, result in found.items()} == {
        "prefix shared while it is read · batch 4 · 2 threads": "path not taken: each request read the shared keys by "
        "itself"
    }


class ReadsTogether(PathExecutor):
    """Tells that it was once spared a read."""

    @property
    def shared_splits(self) -> int:
        """One where the steps decode four together."""
        return int(self.log[-1] == (4, 4, 4))


def test_one_step_that_reads_for_all_will_do() -> None:
    assert failed(prove(ReadsTogether)) == {}


def test_a_context_too_small_for_the_requests_is_refused_by_name() -> None:
    longest = SHARED_TOKENS + PAGE_TOKENS + 2 * EFFORT.num_new
    verify(loading(PathExecutor), EngineConfig(context_length=longest), HOST, full=False, effort=EFFORT)
    with pytest.raises(ParameterError, match=f"context_length={longest - 1}.*at least {longest}"):
        verify(loading(PathExecutor), EngineConfig(context_length=longest - 1), HOST, full=False, effort=EFFORT)


class Breaking(PathExecutor):
    """Raises where one instruction set runs."""

    def run(self, plan: StepPlan) -> StepResult:
        """The step, or the error."""
        if self.config.isa == "scalar":
            raise RuntimeError("illegal instruction")
        return super().run(plan)


def test_a_path_that_breaks_is_a_failure_of_its_cell_alone() -> None:
    found = failed(prove(Breaking, host=replace(HOST, isas=("scalar",))))
    assert {name: result.problem for name, result in found.items()} == {
        "scalar · batch 2 · 2 threads": "RuntimeError: illegal instruction"
    }


def test_what_breaks_the_plain_path_is_raised() -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        verify(loading(Breaking), EngineConfig(isa="scalar"), HOST, full=False, effort=EFFORT)


# KV formats


class Rounded(PathExecutor):
    """Moves the logits a little in another KV format: as rounding does, or much."""

    deviation = 0.02

    def run(self, plan: StepPlan) -> StepResult:
        """The step, its logits moved by noise that depends on the sequence alone."""
        result = super().run(plan)
        if self.config.kv_dtype == "f16":
            return result
        tokens = result.sampled.tokens.copy()
        for output, row in enumerate(self._logits):
            noise = np.random.default_rng(row.view(np.uint32)[:8].tolist()).standard_normal(VOCAB)
            row += (self.deviation * noise).astype(np.float32)
            record = plan.samples.rows[output]
            if record["forced"] < 0 and record["mask"] < 0:  # a structure is obeyed in every format
                tokens[output] = np.argmax(row)
        return replace(result, sampled=replace(result.sampled, tokens=tokens))


class RoundedMuch(Rounded):
    """As if the format were broken."""

    deviation = 1.0


def formats(proof: Proof) -> dict[str, Result]:
    return {result.varied: result for result in proof.results if result.dimension == "kv"}


def test_rounding_is_a_tie_and_the_format_is_equal_to_itself() -> None:
    found = formats(prove(Rounded, host=replace(HOST, kv_formats=("int8",))))
    assert {name: result.verdict for name, result in found.items()} == {
        "int8 KV against f16 KV": "TIE",
        "int8 KV against itself · cache partly hit · chunk 16 · batch 2 · 2 threads": "EQUAL",
        "int8 KV against itself · prefix shared while it is read · batch 4 · 2 threads": "EQUAL",
    }
    rounding = found["int8 KV against f16 KV"].rounding
    assert rounding is not None
    assert rounding.drift == pytest.approx(0.02, rel=0.1)
    assert 0 < rounding.mean_kl < 0.02**2


def test_more_than_rounding_is_a_failure() -> None:
    found = formats(prove(RoundedMuch, host=replace(HOST, kv_formats=("int8",))))
    result = found["int8 KV against f16 KV"]
    assert result.verdict == "FAIL"
    assert result.rounding is not None
    assert result.rounding.drift > result.rounding.drift_bound
    assert result.difference is not None


def test_a_configuration_in_another_format_is_compared_with_f16_as_well() -> None:
    proof = verify(loading(Rounded), EngineConfig(kv_dtype="int8"), HOST, full=False, effort=EFFORT)
    assert proof.plain_path["kv_dtype"] == "int8"
    assert {name: result.verdict for name, result in formats(proof).items()} == {"int8 KV against f16 KV": "TIE"}
    assert failed(proof) == {}
