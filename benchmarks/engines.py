"""One engine in one process, for compare.py: reads jobs as lines of JSON, runs them, writes results as lines of JSON.

A job is {"prompts": [[token, ...], ...], "num_new": n, "concurrency": c}: every prompt is answered greedily by exactly
n tokens, at most c at a time. Its result is {"first_s", "total_s", "tokens"}: seconds to the first token of the first
prompt, seconds to the last token of all, and the answer to the first prompt. A failed job's result is {"error"}. The
first line, before any job, is {"version", "path"} or {"error"}.

With --once, one answer is generated instead, a character is written as soon as its first token is known, and the last
line is {"peak_bytes"}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

# Nothing else at the top: an engine's time to its first token contains only its own imports.

Job = dict[str, Any]
FirstToken = Callable[[float], None]
"""Called with how many seconds ago the first token was known."""


class Engine(Protocol):
    """A loaded model."""

    version: str
    path: dict[str, Any]

    def answer(
        self, prompts: Sequence[Sequence[int]], *, num_new: int, concurrency: int, first_token: FirstToken
    ) -> list[int]:
        """The answer to the first prompt, once all are answered; ``first_token`` is called about its first token."""
        ...


class Paceline:
    """This package, through its Python interface."""

    def __init__(self, args: argparse.Namespace) -> None:
        import paceline
        from paceline.llm import LLM

        fields = {"isa": args.isa, "weights": args.weights, "speculate": args.speculate}
        self._llm = LLM(
            str(args.model),
            num_threads=args.threads,
            **{key: value for key, value in fields.items() if value is not None},
        )
        self.version = paceline.__version__
        self.path: dict[str, Any] = dict(self._llm.path())

    def answer(
        self, prompts: Sequence[Sequence[int]], *, num_new: int, concurrency: int, first_token: FirstToken
    ) -> list[int]:
        from paceline.measure.runs import cold_domain
        from paceline.params import SamplingParams

        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        domain = cold_domain()  # nothing that another job computed is found; inside one job the prefix cache works
        if len(prompts) > 1:
            return self._closed_loop(prompts, params, concurrency, domain)
        completion = self._llm.generate(list(prompts[0]), params, cache_domain=domain)
        first_token(completion.timing.e2e_s - completion.timing.ttft_s)
        return list(completion.token_ids)

    def _closed_loop(self, prompts: Sequence[Sequence[int]], params: Any, concurrency: int, domain: str) -> list[int]:
        """``concurrency`` clients, each of which sends its next request when its last one is answered."""
        import asyncio

        answers: list[list[int]] = [[]] * len(prompts)
        waiting = iter(enumerate(prompts))

        async def client() -> None:
            for index, prompt in waiting:
                done = await self._llm.agenerate(list(prompt), params, cache_domain=domain)
                answers[index] = list(done.token_ids)

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(concurrency)))

        asyncio.run(clients())
        return answers[0]


class LlamaCpp:
    """llama.cpp through its C interface, as its own benchmark uses it: no Python sampling, contexts as large as the job
    needs.
    """

    BATCH = 2048
    """Tokens given to one call; llama.cpp's own default, as is the physical batch of 512."""

    def __init__(self, args: argparse.Namespace) -> None:
        from importlib.metadata import version

        import llama_cpp

        self._api = llama_cpp
        self._threads = args.threads
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            os.fsencode(args.model), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {args.model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._sizes = (0, 0)
        self.version = version("llama_cpp_python")
        info = llama_cpp.llama_print_system_info().decode()
        self.path: dict[str, Any] = {"threads": args.threads, "system": info.strip(" |\n"), "interface": "llama_decode"}

    def answer(
        self, prompts: Sequence[Sequence[int]], *, num_new: int, concurrency: int, first_token: FirstToken
    ) -> list[int]:
        """Continuous batching as llama.cpp's server does it: running requests first, then as much of the waiting
        prompts as a batch takes. A slot keeps its last sequence, and a request that begins like it computes the rest.
        """
        api = self._api
        slots = min(concurrency, len(prompts))
        self._reserve(slots, max(map(len, prompts)) + num_new)
        memory = api.llama_get_memory(self._context)
        api.llama_memory_clear(memory, True)
        batch = api.llama_batch_init(self.BATCH, 0, 1)
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))[::-1]
        running: dict[int, list[int]] = {}  # slot -> [prompt, tokens of it in the cache]
        kept: list[list[int]] = [[] for _ in range(slots)]
        try:
            while waiting or running:
                for slot in range(slots):
                    if slot not in running and waiting:
                        index = waiting.pop()
                        cached = common_tokens(kept[slot], prompts[index][:-1])  # the last token's logits are needed
                        if not api.llama_memory_seq_rm(memory, slot, cached, -1):  # not every model's can be cut
                            cached = 0
                            api.llama_memory_seq_rm(memory, slot, -1, -1)
                        running[slot] = [index, cached]
                drawn = self._fill(batch, running, prompts, answers)
                if api.llama_decode(self._context, batch) != 0:
                    raise RuntimeError("llama_decode failed")
                for slot, row in drawn:
                    index, _ = running[slot]
                    answers[index].append(self._argmax(row))
                    if index == 0 and len(answers[0]) == 1:
                        first_token(0.0)
                    if len(answers[index]) == num_new:
                        del running[slot]
                        kept[slot] = [*prompts[index], *answers[index][:-1]]
        finally:
            api.llama_batch_free(batch)
        return answers[0]

    def _fill(
        self, batch: Any, running: dict[int, list[int]], prompts: Sequence[Sequence[int]], answers: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Puts the next tokens of all slots into the batch; (slot, row) of those whose next token will be known."""
        drawn = []
        count = 0
        for slot, state in sorted(running.items(), key=lambda item: not answers[item[1][0]]):
            index, cached = state
            prompt, answer = prompts[index], answers[index]
            tokens = answer[-1:] if answer else prompt[cached : cached + self.BATCH - count]
            for offset, token in enumerate(tokens):
                row = count + offset
                batch.token[row], batch.pos[row] = token, cached + offset
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, slot, 0
            count += len(tokens)
            state[1] = cached + len(tokens)
            if tokens and state[1] >= len(prompt):
                batch.logits[count - 1] = 1
                drawn.append((slot, count - 1))
        batch.n_tokens = count
        return drawn

    def _reserve(self, slots: int, num_tokens: int) -> None:
        """A context for that many sequences of that many tokens; the one there is when it fits exactly."""
        num_tokens = -(-num_tokens // 256) * 256
        if self._context is not None and self._sizes == (slots, num_tokens):
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = slots * num_tokens, slots, self.BATCH
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {slots} x {num_tokens} tokens")
        self._sizes = (slots, num_tokens)

    def _argmax(self, row: int) -> int:
        import numpy as np

        return int(
            np.argmax(np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, row), (self._vocab_size,)))
        )


class Transformers:
    """Transformers on torch: a GGUF file's weights dequantised by itself; batches are static, all of one length."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(args.threads)
        dtype = getattr(torch, args.dtype)
        directory, options = (
            (args.model, {}) if args.model.is_dir() else (args.model.parent, {"gguf_file": args.model.name})
        )
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self.path: dict[str, Any] = {
            "threads": args.threads,
            "dtype": args.dtype,
            "isa": torch.backends.cpu.get_cpu_capability(),
            "attention": self._model.config._attn_implementation,
        }

    def answer(
        self, prompts: Sequence[Sequence[int]], *, num_new: int, concurrency: int, first_token: FirstToken
    ) -> list[int]:
        import torch
        from transformers import DynamicCache

        first_answer: list[int] = []
        with torch.inference_mode():
            for start in range(0, len(prompts), concurrency):
                cache = DynamicCache(config=self._model.config)
                tokens = torch.tensor([list(prompt) for prompt in prompts[start : start + concurrency]])
                for _ in range(num_new):
                    logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                    tokens = logits[:, -1].argmax(dim=-1, keepdim=True)
                    if start == 0:
                        first_answer.append(int(tokens[0, 0]))
                        if len(first_answer) == 1:
                            first_token(0.0)
        return first_answer


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens of both agree from the beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "paceline": Paceline,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def run_job(engine: Engine, job: Job) -> Job:
    """The result of a job."""
    seen: list[float] = []
    started_s = time.perf_counter()
    tokens = engine.answer(
        job["prompts"],
        num_new=job["num_new"],
        concurrency=job["concurrency"],
        first_token=lambda seconds_ago: seen.append(time.perf_counter() - started_s - seconds_ago),
    )
    total_s = time.perf_counter() - started_s
    if len(tokens) != job["num_new"]:
        raise RuntimeError(f"{len(tokens)} tokens instead of {job['num_new']}")
    return {"first_s": seen[0] if seen else None, "total_s": total_s, "tokens": tokens}


def serve(args: argparse.Namespace, jobs: Any, results: Any) -> None:
    """Answers jobs until there are no more."""

    def send(document: Job) -> None:
        results.write(json.dumps(document) + "\n")
        results.flush()

    try:
        engine = ENGINES[args.engine](args)
    except Exception as error:  # whatever a peer raises: the comparison goes on without it
        return send({"error": f"{type(error).__name__}: {error}"})
    send({"version": engine.version, "path": engine.path})
    for line in jobs:
        try:
            send(run_job(engine, json.loads(line)))
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
    return None


def once(args: argparse.Namespace, results: Any) -> None:
    """One answer, then the largest resident memory that this process had."""

    def first_token(seconds_ago: float) -> None:
        results.write("1")
        results.flush()

    job = json.loads(sys.stdin.read())
    if args.engine == "paceline":
        from paceline.cli.main import main

        sys.stdout = results  # the command's first piece of text is what a person waits for
        options = ["--threads", str(args.threads)]
        for flag in ("isa", "weights", "speculate"):
            options += [f"--{flag}", getattr(args, flag)] if getattr(args, flag) else []
        limit = ["--max-tokens", str(job["num_new"]), "--ignore-eos"]
        status = main(["run", str(args.model), "--raw", "-p", job["text"], *limit, *options])
        if status:
            raise SystemExit(status)
    else:
        engine = ENGINES[args.engine](args)
        engine.answer(job["prompts"], num_new=job["num_new"], concurrency=1, first_token=first_token)
    results.write("\n" + json.dumps({"peak_bytes": peak_bytes()}) + "\n")
    results.flush()


def peak_bytes() -> int | None:
    """The largest resident memory of this process so far, files it maps included; None where the system does not say.

    Not ``ru_maxrss``: that starts at what the parent had when it forked.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def main() -> int:
    """The worker."""
    parser = argparse.ArgumentParser(description="Worker of compare.py.")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--isa")
    parser.add_argument("--weights")
    parser.add_argument("--speculate", default="off")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    # Results go out by a descriptor of their own; what a library prints must not mix with them.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if args.once:
        once(args, results)
    else:
        serve(args, sys.stdin, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
