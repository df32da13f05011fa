"""Grammars over the tokens of a model: what a structure allows to follow, token by token, by llguidance.

llguidance (github.com/guidance-ai/llguidance) parses with Earley's algorithm over lexemes whose regular expressions are
matched by derivatives, and walks the vocabulary as a trie of bytes. It is imported with the first structure.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ParameterError, RequestError, UnsupportedError
from paceline.params import Structure
from paceline.sampling.json_schema import JSON_OPTIONS, parse_schema
from paceline.sampling.rows import mask_width

_T = TypeVar("_T")

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Structures that stay compiled, the least recently used one goes: some hundred kB each."""

MAX_LEXER_STATES = 50_000
"""Of one grammar, at 1 to 2 kB a state."""

MAX_ROW_ITEMS = 20_000
"""Ways in which one byte may be read: an object takes four for each property that it may have."""

MAX_PARTS = 5_000
"""Rules and brackets of a grammar, brackets of a schema: so deep it may be, and llguidance descends by recursion."""

STACK_BYTES = 128 << 20
"""Of the thread that compiles: 8 kB for each of ``MAX_PARTS`` were measured. The usual 8 MB end with the process."""

MAX_TOKEN_S = 0.2
"""Seconds of processor time that one token of one answer may take: nobody's answer goes on meanwhile. Most take 0.1 ms;
an ambiguous grammar can grow to seconds within limits that a large schema needs."""

# Texts, expressions and comments of a Lark grammar: what a "<" inside of them is means nothing.
_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')


class Vocabulary(Protocol):
    """What a grammar needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, empty for control tokens."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Matcher:
    """How far one answer has come in its grammar. Raises ``ParameterError`` once the grammar exceeds its limits."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, name: str) -> None:
        """``name`` is what errors call the structure."""
        self._matcher = matcher
        self._name = name
        self._width = mask_width(vocab_size)

    def allowed(self, words: NDArray[np.uint32]) -> None:
        """Writes which tokens may follow into ``words`` [ceil(vocab / 32)], a bit each; ends of text where the answer
        may end, and only these where it must. Without the GIL."""
        assert words.shape == (self._width,)
        assert words.dtype == np.uint32
        since_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check(since_s)

    def advance(self, token: int) -> None:
        """Goes on behind a token that may follow."""
        since_s = time.thread_time()
        self._matcher.consume_token(token)
        self._check(since_s)

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other. Changes nothing."""
        count = self._matcher.validate_tokens(list(tokens))
        self._check()
        return count

    def forced(self) -> list[int]:
        """Tokens that spell what must follow, as the tokenizer would; other tokens may spell it, too."""
        return self._matcher.compute_ff_tokens()

    @property
    def is_done(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the answer is whole as it is."""
        return self._matcher.is_accepting()

    def _check(self, since_s: float | None = None) -> None:
        reason = None
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
        elif since_s is not None and (took_s := time.thread_time() - since_s) > MAX_TOKEN_S:
            reason = f"a token took {took_s:.2f} s"
        if reason is not None:
            raise ParameterError(self._name, "a grammar", f"one that can be followed within its limits: {reason}")


class CompiledGrammar:
    """A structure over one vocabulary. ``matcher`` starts an answer."""

    def __init__(self, prototype: LLMatcher, vocab_size: int) -> None:
        self._prototype = prototype
        self._vocab_size = vocab_size

    def matcher(self, name: str = "structure") -> Matcher:
        """At the beginning of an answer, whose structure errors call ``name``; takes some 50 µs."""
        return Matcher(self._prototype.deep_copy(), self._vocab_size, name)


class GrammarCompiler:
    """Compiles structures for one model, whose ids are 0 .. ``vocab_size`` - 1. May be used from several threads.

    Tokens without bytes (control tokens, ids beyond the tokenizer) are in no answer, but for the ends of text.
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # guards the two below
        self._ll_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Structure, CompiledGrammar] = OrderedDict()

    def compile(self, structure: Structure) -> CompiledGrammar:
        """The grammar of a structure: from the cache, or in milliseconds (a first one, or a large one, in a second).

        Raises ``ParameterError`` for what does not compile or would not hold, ``UnsupportedError`` without llguidance.
        """
        with self._lock:
            found = self._compiled.get(structure)
            if found is not None:
                self._compiled.move_to_end(structure)
                return found
            tokenizer = self._ll_tokenizer = self._ll_tokenizer or self._make_tokenizer()
        compiled = CompiledGrammar(_with_deep_stack(partial(_compile, structure, tokenizer)), self._vocab_size)
        with self._lock:
            self._compiled[structure] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _make_tokenizer(self) -> LLTokenizer:
        llguidance = _llguidance()
        ends = [token for token in self._tokenizer.eos_token_ids if 0 <= token < self._vocab_size]
        if not ends:
            raise UnsupportedError("structured output of a model without an end of text: nothing would end an answer")
        tokens = [self._tokenizer.token_bytes(token) for token in range(self._vocab_size)]
        for number, token in enumerate(ends):
            tokens[token] = f"<|end {number}|>".encode()
        wrapper = _TokenizerWrapper(tokens, ends, self._tokenizer)
        tokenizer: LLTokenizer = llguidance.LLTokenizer(wrapper, eos_token=ends)
        return tokenizer


class _TokenizerWrapper:
    """A tokenizer as llguidance wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: list[int], tokenizer: Vocabulary) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.special_token_ids = ends
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError("structured output needs llguidance: pip install paceline[structured]") from None
    return llguidance


_stack_lock = threading.Lock()


def _with_deep_stack(work: Callable[[], _T]) -> _T:
    """What ``work`` returns or raises, from a thread with ``STACK_BYTES``."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _stack_lock:  # the size is one for all threads that begin
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="paceline-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    return outcome.result()


def _compile(structure: Structure, tokenizer: LLTokenizer) -> LLMatcher:
    llguidance = _llguidance()
    try:
        grammar = _grammar(structure, llguidance.LLMatcher)
    except (ValueError, RecursionError) as error:  # no schema, half of a surrogate pair, too deep
        raise _refusal(structure, str(error)) from None
    limits = llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False
    )
    matcher: LLMatcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    trial = matcher.deep_copy()
    trial.compute_bitmask()  # the first mask is the dearest for many a grammar: what fails there is refused, too
    if trial.is_error():
        raise _refusal(structure, trial.get_error())
    if warnings := matcher.get_grammar_warnings():  # each says that something will not hold
        raise _refusal(structure, "; ".join(warnings))
    return matcher


def _grammar(structure: Structure, matcher: Any) -> str:
    """The structure in llguidance's own terms."""
    grammar: str
    if structure.kind == "json_object":
        grammar = matcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
    elif structure.kind == "json_schema":
        _check_parts(structure, "[{")
        schema = json.dumps(parse_schema(structure.source), allow_nan=False)
        grammar = matcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    elif structure.kind == "regex":
        grammar = matcher.grammar_from_regex(structure.source)
    elif structure.kind == "choice":
        grammar = matcher.grammar_from_lark("start: " + " | ".join(map(_lark_text, _texts(structure))))
    else:
        if "<" in _LARK_LITERAL.sub("", structure.source):
            raise _refusal(structure, "special tokens cannot be part of an answer's text")
        _check_parts(structure, ":([{")
        grammar = matcher.grammar_from_lark(structure.source)
    return grammar


def _check_parts(structure: Structure, brackets: str) -> None:
    count = sum(map(structure.source.count, brackets))
    if count > MAX_PARTS:
        raise _refusal(structure, f"at most {MAX_PARTS} parts ({' '.join(brackets)}), and it has {count}")


def _texts(structure: Structure) -> list[str]:
    try:
        texts = json.loads(structure.source)
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise _refusal(structure, "a list of texts, none of them empty")
    return texts


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refusal(structure: Structure, reason: str) -> RequestError:
    return ParameterError(structure.name, structure.kind, reason.strip()[:1000])
