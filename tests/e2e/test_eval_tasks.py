"""`paceline eval --tasks`: lm-eval's tasks in this process; its log-likelihoods are those of the engine, to the bit.

Installed it takes half a gigabyte, so most of these tests run only where it is (`pip install paceline[eval]`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.params import SamplingParams

MODEL = "smollm2-135m"
PAIRS = [
    ("The capital of Korea is", " Seoul."),
    ("The capital of Korea is", " a large sea of green cheese."),
    ("One, two, three, ", "four, five, six"),
    ("한국의 수도는", " 서울입니다 😀"),
    ("", "An empty context has the first token of a text in its place."),
]
CHOICES = [
    {"question": "The sun rises in the", "choices": ["east", "refrigerator"], "answer": 0},
    {"question": "Snow is", "choices": ["purple and hot", "white and cold"], "answer": 1},
    {"question": "One plus one is", "choices": ["two", "a banana"], "answer": 0},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, context_length=256) as loaded:
        yield loaded


@pytest.fixture
def model(llm: LLM) -> Any:
    """lm-eval's model over the engine."""
    pytest.importorskip("lm_eval")
    from paceline.measure.quality.harness import PacelineLM

    return PacelineLM(llm)


def instances(arguments: list[tuple[Any, ...]], kind: str = "loglikelihood") -> list[Any]:
    """Requests as a task makes them."""
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=at) for at, one in enumerate(arguments)]


def expected(llm: LLM, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Log-likelihood of tokens and whether they are the greedy ones, token by token: each is a request of its own."""
    logprob, greedy = 0.0, True
    for at, token in enumerate(after):
        prompt = [*before, *after[:at]]
        params = SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True)
        (entry,) = llm.generate(prompt, params).logprobs or []
        greedy = greedy and entry.token_id == token
        completion = llm.generate([*prompt, token], SamplingParams(max_tokens=1, prompt_logprobs=0))
        last = (completion.prompt_logprobs or [None])[-1]
        assert last is not None
        assert all(top.logprob == last.logprob for top in entry.top if top.token_id == token)
        logprob += last.logprob
    return logprob, greedy


def test_loglikelihoods_are_those_of_the_engine(llm: LLM, model: Any) -> None:
    found = [tuple(answer) for answer in model.loglikelihood(instances(PAIRS))]
    encode = llm.tokenizer.encode
    for (context, continuation), answer in zip(PAIRS, found, strict=True):
        before = encode(context.rstrip(), False) if context else [llm.tokenizer.bos_token_id or 0]
        whole = encode(context + continuation, False)
        after = whole[len(before) :] if context else whole
        assert answer == expected(llm, before, after)
    assert found[0][0] > found[1][0]


def test_long_contexts_lose_their_beginning(llm: LLM, model: Any) -> None:
    tokens = llm.tokenizer.encode(" one two three four" * 80, False)
    context, continuation = tokens[:300], tokens[300:304]
    ((logprob, is_greedy),) = model._loglikelihood_tokens([(("", ""), context, continuation)])
    assert (logprob, is_greedy) == expected(llm, context[300 + 4 - 255 :], continuation)
    with pytest.raises(ParameterError, match="at most 254 tokens"):
        model._loglikelihood_tokens([(("", ""), context, tokens[:255])])


def test_rolling_scores_every_token_once(llm: LLM, model: Any) -> None:
    text = "A bird in the hand is worth two in the bush. " * 40
    tokens = llm.tokenizer.encode(text, False)
    assert 255 < len(tokens) < 508
    (found,) = model.loglikelihood_rolling(instances([(text,)], "loglikelihood_rolling"))
    bos = llm.tokenizer.bos_token_id
    assert bos is not None
    # Two windows: the first after BOS, the last as long as the context and scoring what is left.
    windows = [([bos], tokens[:254]), (tokens[len(tokens) - 255 : 254], tokens[254:])]
    assert found == pytest.approx(
        sum(model._loglikelihood_tokens([(("", ""), *window)])[0][0] for window in windows), rel=1e-12
    )


def test_answers_end_where_a_task_says(llm: LLM, model: Any) -> None:
    options = {"until": ["."], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}
    (text,) = model.generate_until(instances([(PAIRS[0][0], options)], "generate_until"))
    assert text == llm.generate(PAIRS[0][0], SamplingParams(max_tokens=20, stop=(".",))).text
    with pytest.raises(ParameterError, match="num_beams"):
        model.generate_until(instances([("a", {"num_beams": 4})], "generate_until"))
    with pytest.raises(ParameterError, match="at most 255"):
        model.generate_until(instances([("a", {"max_gen_toks": 256})], "generate_until"))


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a task of choices and one of answers."""
    pytest.importorskip("lm_eval")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(choice) + "\n" for choice in CHOICES))
    folder = tmp_path / "tasks"
    folder.mkdir()
    source = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{data}"}}}}\ntest_split: test\n'
    (folder / "choice.yaml").write_text(
        f'task: tiny_choice\n{source}output_type: multiple_choice\ndoc_to_text: "{{{{question}}}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
    )
    (folder / "answer.yaml").write_text(
        f'task: tiny_answer\n{source}output_type: generate_until\ndoc_to_text: "{{{{question}}}}"\n'
        'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 4, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    return folder


def test_tasks_of_a_directory(tasks: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", MODEL, "--tasks", "tiny_choice,tiny_answer", "--include-path", str(tasks), "--context", "256"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (found,) = document["models"]
    assert found["tasks"]["tiny_choice"]["samples"] == 3
    tokenizer = llm.tokenizer
    right = 0
    for choice in CHOICES:
        before = tokenizer.encode(choice["question"], False)
        scores = [expected(llm, before, tokenizer.encode(f" {text}", False))[0] for text in choice["choices"]]
        right += scores.index(max(scores)) == choice["answer"]
    assert found["tasks"]["tiny_choice"]["acc"] == pytest.approx(right / 3)
    assert 0 <= found["tasks"]["tiny_answer"]["exact_match"] <= 1
    assert main([*words, "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "tiny_choice: 2 documents" in shown
    assert any(line.split()[:2] == ["tiny_choice", "acc"] for line in shown.splitlines())


def test_a_group_counts_the_documents_of_its_tasks(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tasks / "both.yaml").write_text(
        "group: tiny_both\ntask: [tiny_choice, tiny_answer]\naggregate_metric_list: [{metric: acc}]\n"
    )
    words = ["eval", MODEL, "--tasks", "tiny_both", "--include-path", str(tasks), "--context", "256", "--limit", "1"]
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert {task: figures["samples"] for task, figures in found["tasks"].items()} == {
        "tiny_both": 2, "tiny_choice": 1, "tiny_answer": 1
    }  # fmt: skip
    assert found["tasks"]["tiny_choice"].keys() == {"acc", "acc_norm", "samples"}, "no deviation of one document"
    assert main(words) == 0
    assert "tiny_both: 2 documents" in capsys.readouterr().out


def test_unknown_tasks_are_one_line(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", MODEL, "--tasks", "no_such_task", "--include-path", str(tasks)]) == 2
    assert "tasks='no_such_task' is not possible" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "3"], "with --tasks only"),
        (["--tasks", "a", "--text", "b.txt"], "without --tasks"),
        (["--tasks", "a", "--reference", "none"], "without --tasks"),
        (["--tasks", "a", "--windows", "chunks"], "without --tasks"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", MODEL, *words]) == 2
    assert message in capsys.readouterr().err


def test_without_lm_eval_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*(name for name in sys.modules if name.startswith("lm_eval")), "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "paceline.measure.quality.harness", raising=False)
    assert main(["eval", MODEL, "--tasks", "a"]) == 1
    assert "pip install paceline[eval]" in capsys.readouterr().err
