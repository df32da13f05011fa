"""Flags of the command line: each field of the two configurations has one, and a wrong value is one clear line."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from paceline.cli.arguments import (
    ENGINE_FIELDS,
    SAMPLING_FIELDS,
    add_engine_arguments,
    add_sampling_arguments,
    byte_size,
    engine_config,
    positive,
    sampling_params,
)
from paceline.cli.main import main
from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.params import SamplingParams, Structure


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    return parser.parse_args(words)


def test_every_sampling_field_has_a_flag() -> None:
    assert set(SAMPLING_FIELDS.values()) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_engine_field_but_the_seed_has_a_flag() -> None:
    # --seed is the request's: the engine's seed only matters to requests that have none.
    assert set(ENGINE_FIELDS.values()) == {field.name for field in dataclasses.fields(EngineConfig)} - {"seed"}


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    args = parse()
    assert sampling_params(args) == SamplingParams()
    assert engine_config(args) == EngineConfig()
    assert engine_config(args, max_batch=8).max_batch == 8
    assert engine_config(parse("--max-batch", "4"), max_batch=8).max_batch == 4


def test_every_sampling_flag_reaches_its_field() -> None:
    words = [
        "--temperature",
        "0.7",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--min-p",
        "0.05",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "0.2",
        "--frequency-penalty",
        "0.3",
        "--logit-bias",
        "198=-5",
        "--logit-bias",
        "7=2.5",
        "--seed",
        "3",
        "--n",
        "2",
        "--max-tokens",
        "9",
        "--min-tokens",
        "4",
        "--stop-token-id",
        "5",
        "--stop-token-id",
        "6",
        "--ignore-eos",
        "--logprobs",
        "2",
        "--prompt-logprobs",
        "1",
        "--structure",
        "regex=a=b|c",
    ]
    params = sampling_params(parse(*words, "--stop", "\n\n", "--stop", "END"))
    assert params == SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={198: -5.0, 7: 2.5},
        seed=3,
        n=2,
        max_tokens=9,
        min_tokens=4,
        stop=("\n\n", "END"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        structure=Structure("regex", "a=b|c"),
    )


def test_a_structure_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    params = sampling_params(parse("--structure", f"json_schema=@{tmp_path / 'schema.json'}"))
    assert params.structure == Structure("json_schema", '{"type": "object"}')
    assert sampling_params(parse("--structure", "json_object")).structure == Structure("json_object")


@pytest.mark.parametrize("value", ["yaml=x", "regex", "regex=", "json_object=x", "json_schema=@/nowhere/at/all"])
def test_an_impossible_structure_is_refused(value: str) -> None:
    with pytest.raises(SystemExit):
        parse("--structure", value)


@pytest.mark.parametrize(("given", "expected"), [("4", "int4"), ("8", "int8"), ("int4", "int4"), ("bf16", "bf16")])
def test_bits_of_the_head_are_formats(given: str, expected: str) -> None:
    assert engine_config(parse("--head-bits", given)).head_bits == expected
    with pytest.raises(SystemExit):
        parse("--head-bits", "3")


def test_every_engine_flag_reaches_its_field() -> None:
    words = [
        "--weights",
        "int8",
        "--head-bits",
        "bf16",
        "--kv",
        "bf16",
        "--threads",
        "3",
        "--isa",
        "scalar",
        "--context",
        "512",
        "--max-batch",
        "7",
        "--token-budget",
        "99",
        "--kv-memory",
        "64M",
    ]
    assert engine_config(parse(*words)) == EngineConfig(
        weights="int8",
        head_bits="bf16",
        kv_dtype="bf16",
        num_threads=3,
        isa="scalar",
        context_length=512,
        max_batch=7,
        token_budget=99,
        kv_memory_bytes=64 << 20,
    )


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("800000", 800000), ("2k", 2048), ("512M", 512 << 20), ("1.5G", 3 << 29)]
)
def test_byte_size(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1M", "0", "0.1", "12T", "nan", "inf", "1e999G", "two"])
def test_byte_size_rejects(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no size"):
        byte_size(text)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "", "many"])
def test_positive_rejects(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        positive(text)


def test_impossible_value_names_the_field_and_the_range() -> None:
    with pytest.raises(ParameterError, match=r"top_p=3\.0 .* between"):
        sampling_params(parse("--top-p", "3"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["run", "-p", "x", "--top-p", "3"], "top_p=3.0"),
        (["run", "-p", "x", "--temperature", "nan"], "temperature=nan"),
        (["run", "-p", "x", "--max-batch", "0"], "max_batch=0"),
        (["run", "-p", "x", "--max-tokens", "many"], "--max-tokens"),
        (["run", "-p", "x", "--logit-bias", "5"], "--logit-bias"),
        (["run", "-p", "x", "--kv-memory", "lots"], "--kv-memory"),
        (["run", "-p", "x", "--weights", "int3"], "--weights"),
        (["run", "-p", "x", "--frobnicate"], "--frobnicate"),
        (["run", "-p", "x", "--chat", "--raw"], "--raw"),
        (["run", "-p", ""], "prompt=''"),
        (["run", "-p", "x", "--logprobs", "2"], "--json"),
        (["chat", "--n", "2"], "n=2"),
        (["bench"], "WORKLOAD"),
        (["bench", "sideways"], "sideways"),
        (["bench", "decode", "--runs", "0"], "--runs"),
        (["fly"], "fly"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert names in captured.err
    assert "error" in captured.err


def test_unknown_model_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm3", "-p", "x"]) == 1
    error = capsys.readouterr().err
    assert "smollm3" in error
    assert "smollm2-135m" in error
    assert error.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline import __version__

    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("run", "chat", "bench", "verify", "demo", "models", "pull"))
