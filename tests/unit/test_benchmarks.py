"""The benchmark programs: models they write, the float32 reference, divergence, and comparisons of little scripts."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_llm import byte_llm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare
import engines
import float32_reference
import quality
import synthetic
import worker

from paceline.executors.base import StepPlan
from paceline.models.registry import build_graph
from paceline.ops.reference import KeyValues, Step, attention
from paceline.ops.spec import OPS
from paceline.text.tokenizer import load_tokenizer
from paceline.weights.blocks import dequantize
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.inventory import expected_shapes

TEXT = "the Hen in\n\n on 1234 é 한국어"


def write(directory: Path, kind: str, *, shape: str = "tiny") -> Path:
    """A tiny model: GGUF of that kind, or safetensors."""
    if kind == "safetensors":
        synthetic.write_safetensors(directory / "model", synthetic.SHAPES["tiny"], shard_bytes=200_000)
        return directory / "model"
    path = directory / "model.gguf"
    synthetic.write_gguf(path, synthetic.SHAPES[shape], kind)
    return path


# synthetic.py


def test_shapes_have_the_parameters_of_the_real_models() -> None:
    counts = {
        name: sum(math.prod(shape) for shape in expected_shapes(dimensions.config()).values())
        for name, dimensions in synthetic.SHAPES.items()
    }
    assert counts["1b"] == 1_235_814_400
    assert counts["3b"] == 3_212_749_824
    assert counts["8b"] == 8_030_261_248
    assert counts["30b-a3b"] == 30_532_122_624


@pytest.mark.parametrize("kind", [*synthetic.KINDS, "safetensors"])
def test_synthetic_model_opens_with_sane_weights(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, kind))
    assert checkpoint.config == synthetic.SHAPES["tiny"].config()
    for name in checkpoint.names():
        raw = checkpoint.tensor(name)
        if len(raw.shape) == 2:
            values = dequantize(raw)
            relative = values.std() * math.sqrt(raw.shape[1])
            low, high = (0.5, 2.0) if kind == "safetensors" else (0.97, 1.06)
            assert low < relative < high, name
            assert abs(values.mean()) < 4 * values.std() / math.sqrt(values.size / 32), name
            assert len(np.unique(values)) > 16, name
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.add_bos
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode()), "some merges apply"
    assert tokenizer.vocab_size == checkpoint.config.vocab_size


def test_synthetic_experts_open_as_qwen3_moe(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, "Q4_0", shape="tiny-moe"))
    assert checkpoint.config == synthetic.SHAPES["tiny-moe"].config()
    assert checkpoint.header("blk.1.ffn_gate_inp.weight").kind == "F32"
    down = checkpoint.tensor("blk.1.ffn_down_exps.weight")
    assert (down.shape, down.kind) == ((8, 128, 96), "Q4_0")
    values = dequantize(dataclasses.replace(down, shape=(8 * 128, 96)))
    assert 0.97 < values.std() * math.sqrt(96) < 1.06


def test_synthetic_layers_can_be_fewer(tmp_path: Path) -> None:
    assert synthetic.main([str(tmp_path / "m.gguf"), "--shape", "tiny", "--layers", "1"]) == 0
    assert open_checkpoint(tmp_path / "m.gguf").config.num_layers == 1


def test_both_formats_have_one_tokenizer(tmp_path: Path) -> None:
    first, second = (load_tokenizer(open_checkpoint(write(tmp_path, kind))) for kind in ("Q4_0", "safetensors"))
    assert first.encode(TEXT) == second.encode(TEXT)


def test_shards_are_small_and_indexed(tmp_path: Path) -> None:
    from safetensors import safe_open

    directory = write(tmp_path, "safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    found = {}
    for file in files:
        assert file.stat().st_size < 200_000 + 4096
        with safe_open(file, "np") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
    assert found == index["weight_map"]


def test_synthetic_refuses_a_kind_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        synthetic.main([str(tmp_path / "model"), "--shape", "tiny", "--kind", "Q4_0"])
    with pytest.raises(SystemExit):
        synthetic.main([str(tmp_path / "model"), "--shape", "tiny-moe"])


# float32_reference.py and quality.py


@pytest.mark.parametrize("kind", ["Q4_1", "safetensors"])
def test_float32_reference_is_the_ops_run_one_after_the_other(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, kind))
    windows = np.random.default_rng(1).integers(0, 500, (2, 37)).astype(np.int32)
    reference = float32_reference.Float32Reference(checkpoint, windows, lambda done, total: None)
    graph, model = build_graph(checkpoint.config), checkpoint.config
    plan = float32_reference.windows_plan(windows)
    step = step_of(plan, model, float32_reference.DequantisedWeights(checkpoint, graph))
    values: dict[str, Any] = {}
    for node in graph.nodes:
        outputs = OPS[node.op].reference(node, [values[value.name] for value in node.inputs], step)
        values |= {value.name: table for value, table in zip(node.outputs, outputs, strict=True)}
    expected = values[graph.logits.name].reshape(2, 37, -1)
    for window in range(2):
        np.testing.assert_allclose(reference.logits(window), expected[window], atol=2e-4)
    assert np.abs(expected[0] - expected[1]).max() > 0.1, "windows differ, so mixing them up would show"


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_window_attention_is_the_op(sliding_window: int | None) -> None:
    model = dataclasses.replace(synthetic.SHAPES["tiny"].config(), sliding_window=sliding_window)
    plan = float32_reference.windows_plan(np.zeros((2, 40), np.int32))
    step = step_of(plan, model, None)
    rng = np.random.default_rng(2)
    step.kv.keys[:] = rng.standard_normal(step.kv.keys.shape)
    step.kv.values[:] = rng.standard_normal(step.kv.values.shape)
    q = rng.standard_normal((80, model.q_size)).astype(np.float32)
    node = next(node for node in build_graph(model).nodes if node.op == "attention")
    (expected,) = attention(node, [q], step)
    (got,) = float32_reference.window_attention(node, [q], step, window_tokens=40)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def step_of(plan: StepPlan, model: Any, weights: Any) -> Step:
    shape = (model.num_layers, plan.page_table.size, model.num_kv_heads, 32, model.head_dim)
    kv = KeyValues(np.zeros(shape, np.float32), np.zeros(shape, np.float32), "f32")
    sequences = np.repeat(np.arange(len(plan.page_table), dtype=np.int32), np.diff(plan.row_starts))
    rows = (plan.tokens, plan.positions, sequences, plan.page_table, plan.logit_rows)
    return Step(model, weights, kv, *rows, "float")


def test_divergence_is_its_definition() -> None:
    rng = np.random.default_rng(3)
    count, length, vocabulary = 2, 45, 7
    left, right = rng.standard_normal((2, count, length, vocabulary)).astype(np.float32) * 2
    windows = rng.integers(0, vocabulary, (count, length)).astype(np.int32)
    found = quality.diverge(lambda i: left[i], lambda i: right[i], windows)
    for window in range(count):
        for row in range(length):
            p, q = (np.exp(x[window, row].astype(float)) for x in (left, right))
            p, q = p / p.sum(), q / q.sum()
            expected = sum(p[i] * math.log(p[i] / q[i]) for i in range(vocabulary))
            assert found.kl[window, row] == pytest.approx(expected, abs=1e-12)
            assert found.same_top[window, row] == (p.argmax() == q.argmax())
            if row + 1 < length:
                token = windows[window, row + 1]
                assert found.reference_loss[window, row] == pytest.approx(-math.log(p[token]))
                assert found.loss[window, row] == pytest.approx(-math.log(q[token]))
    figures = quality.summary(found)
    assert figures["mean_kl_interval_95"][0] < figures["mean_kl"] < figures["mean_kl_interval_95"][1]
    assert figures["perplexity"] == pytest.approx(math.exp(found.loss.mean()))


def test_divergence_of_the_same_is_nothing() -> None:
    table = np.random.default_rng(4).standard_normal((9, 5)).astype(np.float32)
    figures = quality.summary(quality.diverge(lambda i: table, lambda i: table, np.zeros((1, 9), np.int32)))
    assert (figures["mean_kl"], figures["top1_agreement"]) == (0.0, 1.0)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(100):
        # Blocks share a level, as neighbouring tokens do: treating tokens as independent would cover far less.
        values = np.repeat(rng.standard_normal((4, 16)), quality.BLOCK_TOKENS, axis=1)
        low, high = quality.bootstrap_interval(values)
        inside += low < 0 < high
    assert 85 <= inside <= 100


def test_text_windows(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, "Q4_0"))
    windows = quality.text_windows(TEXT * 4, checkpoint, num_tokens=50, window_tokens=20)
    ids = load_tokenizer(checkpoint).encode(TEXT * 4)
    assert windows.shape == (2, 20)
    assert windows[0].tolist() == ids[:20]
    assert windows[1].tolist() == [ids[0], *ids[20:39]]
    with pytest.raises(SystemExit, match="longer"):
        quality.text_windows(TEXT, checkpoint, num_tokens=500, window_tokens=20)


# compare.py, worker.py and engines.py

ENGINE = """
import json, sys, time
speed, fail_at = float(sys.argv[1]), int(sys.argv[2])
print(json.dumps({"version": "1", "path": {"threads": 1}}), flush=True)
for index, line in enumerate(sys.stdin):
    job = json.loads(line)
    if index == fail_at:
        print(json.dumps({"error": "ran out"}), flush=True)
        continue
    tokens = [int(token) for token in range(job["num_new"])]
    print(json.dumps({"first_s": 1.0, "total_s": 1.0 + job["num_new"] / speed, "tokens": tokens}), flush=True)
"""


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def comparison(commands: dict[str, list[str]], workloads: list[compare.Workload]) -> compare.Comparison:
    return compare.Comparison(
        names=list(commands),
        commands=commands,
        env={},
        encoder=Bytes(),
        text="text",
        num_rounds=2,
        engines={},
        left_out={},
        figures={name: {} for name in ("start_s", "peak_mb", *(work.name for work in workloads))},
        answers={work.name: {} for work in workloads},
    )


def script(text: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", text, *map(str, arguments)]


def test_engines_take_turns_and_a_failing_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PAUSE_S", 0.0)
    workloads = [compare.Workload("decode", "decode", 8, 5), compare.Workload("batch", "batch", 8, 5, 4, 2)]
    commands = {"a": script(ENGINE, 100, -1), "b": script(ENGINE, 50, -1), "c": script(ENGINE, 10, 1)}
    commands["d"] = script('print(\'{"error": "no such file"}\')')
    run = comparison(commands, workloads)
    run.run(workloads)
    document = run.document()
    decode = document["results"]["decode"]
    assert set(decode) == {"a", "b"}
    assert decode["a"]["runs"] == pytest.approx([80.0, 80.0])
    assert decode["b"]["times"] == pytest.approx(2.0)
    assert decode["b"]["equal_tokens"] == 5
    assert set(document["results"]["batch"]) == {"a", "b", "c"}, "a failed job does not end the engine"
    assert document["left_out"] == {"c decode": "ran out", "d": "no such file"}
    assert compare.table(document)[0].split() == ["a", "b", "c"]


def test_worker_that_dies_says_why() -> None:
    with pytest.raises(worker.EngineError, match="status 3: broken"):
        worker.Worker("x", script("import sys; print('broken', file=sys.stderr); sys.exit(3)"), {})


def test_start_is_the_first_output_of_a_fresh_process() -> None:
    text = "import time; print('1', flush=True); time.sleep(0.4); print('{\"peak_bytes\": 5}')"
    first_s, peak_bytes = worker.measure_start(script(text), {}, {})
    assert peak_bytes == 5
    assert first_s > 0
    with pytest.raises(worker.EngineError, match="status 1"):
        worker.measure_start(script("raise SystemExit(1)"), {}, {})


def test_times_is_the_median_of_the_rounds() -> None:
    assert compare.times([10, 20, 90], [5, 5, 9], lower_is_better=False) == 4
    assert compare.times([1, 2, 4], [2, 2, 40], lower_is_better=True) == 2


def test_prompts_of_a_workload_begin_differently() -> None:
    work = next(work for work in compare.WORKLOADS if work.name == "batch-32")
    prompts = [tuple(p[:32]) for index in range(6) for p in work.job(Bytes(), index)["prompts"]]
    assert len(prompts) == 6 * 64
    assert len(set(prompts)) == len(prompts)


def test_prompts_of_the_prefix_workload_share_their_beginning_within_a_job_alone() -> None:
    work = next(work for work in compare.WORKLOADS if work.name == "prefix")
    for shown, num_shared, num_tail in ((work, 1024, 32), (compare.smaller(work, 16), 64, 2)):
        jobs = [[tuple(prompt) for prompt in shown.job(Bytes(), index)["prompts"]] for index in range(3)]
        for prompts in jobs:
            assert {len(prompt) for prompt in prompts} == {num_shared + num_tail}
            assert len({prompt[:num_shared] for prompt in prompts}) == 1
        assert len({prompts[0][:8] for prompts in jobs}) == 3
    tails = {prompt[1024:] for index in range(3) for prompt in map(tuple, work.job(Bytes(), index)["prompts"])}
    assert len(tails) == 3 * 32


@pytest.mark.parametrize("arguments", [["--engines", "vllm"], ["--workloads", "sing"], ["--runs", "0"]])
def test_unknown_choices_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(arguments)


@pytest.mark.parametrize(("asked", "speculation"), [([], "off"), (["--speculate", "suffix"], "suffix")])
def test_paceline_drafts_beside_other_engines_only_where_asked(
    tmp_path: Path, asked: list[str], speculation: str
) -> None:
    model = write(tmp_path, "Q4_0")
    run = compare.prepare(compare.parse(["--model", str(model), "--engines", "paceline", "--threads", "1", *asked]))
    command = run.commands["paceline"]
    assert command[command.index("--speculate") + 1] == speculation
    fields = dict(zip(("isa", "weights", "dtype"), (None, None, "float32"), strict=True))
    args = argparse.Namespace(engine="paceline", model=model, threads=1, speculate=speculation, **fields)
    assert engines.Paceline(args).path["speculation"] == speculation


def test_a_short_answer_is_no_result() -> None:
    class Short:
        version, path = "", {}

        def answer(self, prompts: Any, **_: Any) -> list[int]:
            return [1]

    with pytest.raises(RuntimeError, match="1 tokens instead of 2"):
        engines.run_job(Short(), {"prompts": [[1]], "num_new": 2, "concurrency": 1})


class FakeLlama:
    """As much of llama.cpp's interface as the adapter uses; the next token is a function of the whole sequence."""

    VOCABULARY = 31

    def __init__(self, *, can_cut: bool = True) -> None:
        self.can_cut = can_cut
        self.sequences: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.largest = self.num_rows = 0

    def llama_get_memory(self, context: Any) -> None: ...

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.sequences.clear()

    def llama_memory_seq_rm(self, memory: Any, slot: int, start: int, end: int) -> bool:
        assert end == -1
        if start > 0 and not self.can_cut:
            return False
        del self.sequences.setdefault(slot, [])[max(0, start) :]
        return True

    def llama_batch_init(self, size: int, embeddings: int, sequences: int) -> argparse.Namespace:
        fields = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return argparse.Namespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **fields)

    def llama_batch_free(self, batch: Any) -> None: ...

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.largest = max(self.largest, batch.n_tokens)
        self.num_rows += batch.n_tokens
        self.rows = {}
        for row in range(batch.n_tokens):
            sequence = self.sequences.setdefault(batch.seq_id[row][0], [])
            assert (batch.pos[row], batch.n_seq_id[row]) == (len(sequence), 1)
            sequence.append(batch.token[row])
            if batch.logits[row]:
                self.rows[row] = self.following(sequence)
        return 0 if batch.n_tokens else 1

    def llama_get_logits_ith(self, context: Any, row: int) -> Any:
        return (ctypes.c_float * self.VOCABULARY)(*(float(i == self.rows[row]) for i in range(self.VOCABULARY)))

    @classmethod
    def following(cls, sequence: list[int]) -> int:
        return sum((index + 1) * token for index, token in enumerate(sequence)) % cls.VOCABULARY


@pytest.mark.parametrize("concurrency", [1, 3, 9])
def test_llama_cpp_batches_answer_each_prompt(monkeypatch: pytest.MonkeyPatch, concurrency: int) -> None:
    adapter = engines.LlamaCpp.__new__(engines.LlamaCpp)
    adapter._api = fake = FakeLlama()
    adapter._context, adapter._vocab_size = None, FakeLlama.VOCABULARY
    monkeypatch.setattr(engines.LlamaCpp, "BATCH", 8)
    monkeypatch.setattr(engines.LlamaCpp, "_reserve", lambda self, slots, tokens: None)
    prompts = [[3 * i + j for j in range(2 + 3 * i)] for i in range(5)]
    for first in range(len(prompts)):
        turned = prompts[first:] + prompts[:first]
        expected = list(turned[0])
        for _ in range(6):
            expected.append(FakeLlama.following(expected))
        seen: list[float] = []
        got = adapter.answer(turned, num_new=6, concurrency=concurrency, first_token=seen.append)
        assert got == expected[len(turned[0]) :]
        assert len(seen) == 1
    assert fake.largest <= 8


@pytest.mark.parametrize("can_cut", [True, False])
def test_llama_cpp_slots_keep_what_the_next_prompt_shares(monkeypatch: pytest.MonkeyPatch, can_cut: bool) -> None:
    adapter = engines.LlamaCpp.__new__(engines.LlamaCpp)
    adapter._api = fake = FakeLlama(can_cut=can_cut)
    adapter._context, adapter._vocab_size = None, FakeLlama.VOCABULARY
    monkeypatch.setattr(engines.LlamaCpp, "_reserve", lambda self, slots, tokens: None)
    shared = list(range(40, 60))
    prompts = [[*shared, 100 + index, 7] for index in range(6)]
    for first in range(6):  # answers are those of a cache that keeps nothing
        turned = prompts[first:] + prompts[:first]
        expected = list(turned[0])
        for _ in range(3):
            expected.append(FakeLlama.following(expected))
        fake.num_rows = 0
        assert adapter.answer(turned, num_new=3, concurrency=2, first_token=lambda s: None) == expected[22:]
        # Two slots compute the common part once each; two rows of a prompt and two more tokens are each one's own.
        assert fake.num_rows == (2 if can_cut else 6) * 20 + 6 * (2 + 2)
    fake.num_rows = 0
    adapter.answer([prompts[0], prompts[0]], num_new=1, concurrency=1, first_token=lambda s: None)
    assert fake.num_rows == 22 + (1 if can_cut else 22), "the last token is computed in any case: its logits are wanted"


def test_paceline_finds_nothing_of_another_job() -> None:
    adapter = engines.Paceline.__new__(engines.Paceline)
    with byte_llm() as llm:
        adapter._llm = llm
        prompts = [[*range(64), 100 + index] for index in range(4)]
        for _ in range(2):
            for job in (prompts[:1], prompts):
                adapter.answer(job, num_new=2, concurrency=2, first_token=lambda s: None)
        assert llm.stats().cache_saved_tokens == 2 * 3 * 64
