"""Serving by executor "torch" against Transformers' own ``generate``, on one model in one process, in turns.

    python benchmarks/torch_generate.py --threads 2 --dtype float32

Both have the same weights (Transformers dequantises a GGUF file itself), greedy answers of one length, one request at a
time and no drafts. A round is one answer of each; figures are medians of rounds. The last line is one JSON document
with ``--json``, else a table. Tokens that differ are counted: where two logits are nearly equal, float32 sums in
another order may choose the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.llm import LLM
from paceline.measure.prompts import prompt_tokens
from paceline.measure.record import environment
from paceline.params import SamplingParams
from paceline.weights.catalog import resolve_model

WEIGHTS = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer, seconds to the first and rate of the others."""

    tokens: tuple[int, ...]
    first_s: float
    tokens_per_s: float


class Clock(transformers.StoppingCriteria):
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        """Called by ``generate`` after each token."""
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(model: Any, prompt: Sequence[int], num_new: int) -> Answer:
    """Transformers' answer."""
    clock = Clock()
    started_s = time.perf_counter()
    tokens = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )
    first, last = clock.times_s[0], clock.times_s[-1]
    return Answer(tuple(tokens[0, len(prompt) :].tolist()), first - started_s, (num_new - 1) / (last - first))


def serve(llm: LLM, prompt: Sequence[int], num_new: int) -> Answer:
    """Ours."""
    done = llm.generate(list(prompt), SamplingParams(max_tokens=num_new, min_tokens=num_new))
    return Answer(tuple(done.token_ids), done.timing.ttft_s, done.timing.decode_tokens_per_s)


def load_transformers(path: Path, dtype: str) -> Any:
    """The model as Transformers loads it."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    return transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype)).eval()


def compare(path: Path, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both with one type of weights."""
    torch.set_num_threads(args.threads)
    model = load_transformers(path, dtype)
    answers: dict[str, list[Answer]] = {"transformers": [], "paceline": []}
    config = {"weights": WEIGHTS[dtype], "num_threads": args.threads, "speculate": "off", "prefix_cache": False}
    length = args.prompt_tokens + args.new_tokens
    with LLM(str(path), executor="torch", device=args.device, context_length=length, max_batch=1, **config) as llm:
        ours = llm.path()
        prompt = prompt_tokens(llm.tokenizer, args.prompt_tokens)
        model.to(args.device)
        for _ in range(args.rounds + 1):
            answers["transformers"].append(generate(model, prompt, args.new_tokens))
            answers["paceline"].append(serve(llm, prompt, args.new_tokens))
    del model
    gc.collect()
    kept = {name: each[1:] for name, each in answers.items()}  # the first round warms up
    theirs, mine = kept["transformers"][0].tokens, kept["paceline"][0].tokens
    figures = {
        name: {
            "decode_tokens_per_s": statistics.median(answer.tokens_per_s for answer in each),
            "ttft_s": statistics.median(answer.first_s for answer in each),
            "rounds": [{key: value for key, value in asdict(answer).items() if key != "tokens"} for answer in each],
        }
        for name, each in kept.items()
    }
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(kept["paceline"], kept["transformers"], strict=True)]
    return {
        "dtype": dtype,
        "path": ours,
        **figures,
        "decode_ratio": statistics.median(ratios),
        "first_difference": next(
            (at for at, pair in enumerate(zip(theirs, mine, strict=True)) if len(set(pair)) > 1), None
        ),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="an alias, a GGUF file or a Hugging Face directory")
    parser.add_argument("--dtype", nargs="+", choices=sorted(WEIGHTS), default=sorted(WEIGHTS, reverse=True))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    path = resolve_model(args.model)
    results = [compare(path, dtype, args) for dtype in args.dtype]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if args.json:
        print(json.dumps({"environment": environment() | versions, "arguments": vars(args), "results": results}))
        return 0
    print(f"{'':10}  {'decode tok/s':>24}  {'first token, ms':>24}  {'ratio':>6}")
    print(f"{'':10}  {'Transformers':>14} {'Paceline':>9}  {'Transformers':>14} {'Paceline':>9}")
    for result in results:
        rate, first = (
            [result[name][key] for name in ("transformers", "paceline")] for key in ("decode_tokens_per_s", "ttft_s")
        )
        line = f"{result['dtype']:10}  {rate[0]:14.1f} {rate[1]:9.1f}  {first[0] * 1e3:14.0f} {first[1] * 1e3:9.0f}"
        print(f"{line}  {result['decode_ratio']:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
