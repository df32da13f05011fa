"""lm-eval's tasks over this engine: its model class in this process, and a run of tasks.

Needs the extra ``[eval]``; nothing else imports this module.

Checked by: tests/e2e/test_eval_tasks.py, where log-likelihoods are those of the engine to the bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from paceline.engine.outputs import Completion
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.measure.runs import Report, quiet
from paceline.params import SamplingParams

_BATCH = 256
"""Requests that are handed to the engine at once: enough to fill its batch, few enough to keep their log-probabilities
in memory."""

_DEFAULT_NEW_TOKENS = 256
_GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


class PacelineLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not checked
    """An ``LLM`` as lm-eval sees a model. A text begins with BOS where the model's tokenizer wants it, once."""

    def __init__(self, llm: LLM, *, name: str = "paceline", report: Report = quiet) -> None:
        super().__init__()
        self._llm = llm
        self._name = name
        self._report = report

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._llm.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing stands before."""
        bos = self._llm.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Tokens of a prompt, so that one more has room."""
        context = self._llm.config.context_length
        assert context is not None, "a loaded model has one"
        return context - 1

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return self._name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, after BOS unless ``add_special_tokens`` is False or it is there already."""
        tokenizer = self._llm.tokenizer
        tokens = tokenizer.encode(string, False)
        bos = tokenizer.bos_token_id
        wants_bos = bool(getattr(tokenizer, "add_bos", False)) and add_special_tokens is not False
        return [bos, *tokens] if wants_bos and bos is not None and tokens[:1] != [bos] else tokens

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises ``ParameterError`` for a model without a template."""
        if self._llm.chat_template is None:
            raise ParameterError("model", self._name, "a model with a chat template")
        return self._llm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's source, for lm-eval's records."""
        return str(getattr(self._llm.chat_template, "source", "")) if chat_template else ""

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows side by side as large as the context."""
        owners, windows = [], []
        for at, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self._llm.tokenizer.encode(request.args[0], False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                owners.append(at)
                windows.append((("", ""), context, continuation))
        totals = [0.0] * len(requests)
        for at, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[at] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """An answer to each context; a context that is too long loses its beginning."""
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            one = generation_params(options)
            assert one.max_tokens is not None
            room = self.max_length + 1 - one.max_tokens
            if room < 1:
                raise ParameterError("max_gen_toks", one.max_tokens, f"at most {self.max_length}, with a prompt")
            prompts.append(self.tok_encode(context)[-room:])
            params.append(one)
        return [completion.text for completion in self._complete(prompts, params)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation and whether each of its tokens is the likeliest; a context that is too
        long loses its beginning."""
        scored = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        prompts = [(context + continuation)[-self.max_length :] for _, context, continuation in requests]
        completions = self._complete(prompts, [scored] * len(prompts))
        results = []
        for request, prompt, completion in zip(requests, prompts, completions, strict=True):
            continuation = request[2]
            if len(continuation) >= len(prompt):
                allowed = f"at most {self.max_length - 1} tokens, the context less one before it and one behind"
                raise ParameterError("continuation", f"{len(continuation)} tokens", allowed)
            results.append(_score(completion, len(continuation)))
        return results

    def _complete(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Iterator[Completion]:
        for start in range(0, len(prompts), _BATCH):
            batch = slice(start, start + _BATCH)
            for completion in self._llm.generate(prompts[batch], params[batch]):
                if completion.error is not None:
                    raise completion.error
                yield completion
            self._report(min(start + _BATCH, len(prompts)), len(prompts))


def generation_params(options: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a task's ``generation_kwargs`` mean; greedy unless ``do_sample``. Raises ``ParameterError``
    for one that has no counterpart."""
    for name, value in options.items():
        if name not in _GENERATION_KEYS:
            raise ParameterError(name, value, f"generation_kwargs among {', '.join(sorted(_GENERATION_KEYS))}")
    until = options.get("until") or ()
    drawn = {
        name: options[name] for name in ("top_p", "top_k", "min_p") if options.get("do_sample") and name in options
    }
    return SamplingParams(
        max_tokens=int(options.get("max_gen_toks", _DEFAULT_NEW_TOKENS)),
        stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
        temperature=float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0,
        **drawn,
    )


def open_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """The tasks of these names, those of ``include_path`` first. Raises ``ParameterError`` for a name that none has."""
    if include_path is not None and not include_path.is_dir():
        raise ParameterError("include_path", str(include_path), "a directory with the YAML files of tasks")
    path = None if include_path is None else str(include_path)
    manager = None
    if path is not None:  # lm-eval's own tasks are thousands of files, which take seconds to look through
        manager = TaskManager(include_path=path, include_defaults=False)
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=path)
    for name in names:
        if not manager.match_tasks([name]):
            raise ParameterError("tasks", name, "tasks of lm-eval or, by their `task:` line, of --include-path")
    return manager


def run_tasks(
    llm: LLM, names: Sequence[str], manager: TaskManager, *, limit: int | None = None, report: Report = quiet
) -> dict[str, dict[str, Any]]:
    """Metric -> value of each task and group, with ``samples``, the number of its documents; ``limit`` is the most that
    are taken of a task. Standard errors stand under ``..._stderr`` where lm-eval knows them; what is not finite is left
    out."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    found = simple_evaluate(
        model=PacelineLM(llm, report=report),
        tasks=list(names),
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    assert found is not None, "only other ranks get nothing"
    samples = found.get("n-samples", {})
    return {
        task: {
            **{_metric(name): float(value) for name, value in figures.items() if _is_metric(name, value)},
            "samples": samples.get(task, {}).get("effective", figures.get("sample_len")),
        }
        for task, figures in found["results"].items()
    }


def _is_metric(name: str, value: object) -> bool:
    """``sample_len`` is none: lm-eval counts documents under this name."""
    return name != "sample_len" and isinstance(value, (int, float)) and math.isfinite(value)


def _metric(name: str) -> str:
    """``acc,none`` is ``acc``: the filter is told only where there is one."""
    return name.removesuffix(",none")


def _score(completion: Completion, num_tokens: int) -> tuple[float, bool]:
    assert completion.prompt_logprobs is not None
    entries = [entry for entry in completion.prompt_logprobs[-num_tokens:] if entry is not None] if num_tokens else []
    return sum(entry.logprob for entry in entries), all(entry.token_id == entry.top[0].token_id for entry in entries)
