"""Structures compiled over a small vocabulary: what each kind lets follow, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from grammar_vocabulary import ENDS, VOCAB, GrammarTokenizer, constraint_of

from paceline.errors import ParameterError, RequestError, UnsupportedError
from paceline.params import SamplingParams, Structure
from paceline.sampling import grammar
from paceline.sampling.constraint import allows
from paceline.sampling.distribution import allowed_tokens
from paceline.sampling.grammar import GrammarCompiler


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarTokenizer(), VOCAB)


def accepts(compiler: GrammarCompiler, structure: Structure, text: str) -> bool:
    """Whether a text, byte for byte, is a whole answer."""
    matcher = compiler.compile(structure).matcher()
    data = list(text.encode())
    if matcher.num_allowed(data) < len(data):
        return False
    for byte in data:
        matcher.advance(byte)
    return matcher.may_end


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

CASES: list[tuple[Structure, list[str], list[str]]] = [
    (Structure("json_object"), ["{}", '{"a": [1, {"b": null}]}', '{"a":"\\nä"}'], ["[]", "1", '{"a"}', "{} "]),
    (
        Structure("json_schema", json.dumps(PERSON)),
        ['{"name": "Ann", "age": 33}', '{"name":"","age":0}', '{\n  "name": "A",\n  "age": 130\n}'],
        ['{"name": "Ann"}', '{"name": "Ann", "age": 131}', '{"name": "Ann", "age": 1, "x": 2}', '{"name":1,"age":1}'],
    ),
    (Structure("json_schema", "true"), ["1", "[]", '"x"'], ["x"]),
    (Structure("json_schema", '{"type": "number", "exclusiveMinimum": 3, "maximum": 4.5}'), ["3.1", "4"], ["3", "5"]),
    (
        Structure("json_schema", '{"prefixItems": [{"exclusiveMinimum": 3}, {"maximum": 3.5}], "minItems": 2}'),
        ["[3.1,3.5]"],
        ["[3,3.5]"],
    ),
    (Structure("regex", r"\d{3}-[a-z]+"), ["123-abc"], ["12-abc", "123-", "x123-abc"]),
    (Structure("regex", "^ab$"), ["ab"], ["^ab$", "abc"]),
    (
        Structure("choice", '["yes", "no", "no \\"way\\"\\n", "naïve\\\\"]'),
        ["no", 'no "way"\n', "naïve\\"],
        ["y", "nope"],
    ),
    (Structure("grammar", 'start: "a" tail*\ntail: /[bc]/ "d" // <- a comment\n'), ["a", "abdcd"], ["ab", "d"]),
]


@pytest.mark.parametrize(("structure", "good", "bad"), CASES, ids=lambda value: getattr(value, "source", None))
def test_each_kind_accepts_its_texts_and_no_others(
    compiler: GrammarCompiler, structure: Structure, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(compiler, structure, text), text
    for text in bad:
        assert not accepts(compiler, structure, text), text


REFUSED = {
    "no JSON": Structure("json_schema", "{"),
    "too deep": Structure("json_schema", "[" * 100_000),
    "a list": Structure("json_schema", "[1]"),
    "nothing": Structure("json_schema", "false"),
    "a keyword that would not hold": Structure("json_schema", '{"not": {"type": "string"}}'),
    "one inside": Structure("json_schema", '{"properties": {"a": {"type": "array", "uniqueItems": true}}}'),
    "an approximation": Structure("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}'),
    "a format": Structure("json_schema", '{"type": "string", "format": "no-such"}'),
    "a document elsewhere": Structure("json_schema", '{"$ref": "http://127.0.0.1:1/schema.json"}'),
    "a file": Structure("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "options": Structure("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'),
    "no number": Structure("json_schema", '{"const": NaN}'),
    "too large a number": Structure("json_schema", '{"const": 1e400}'),
    "half of a surrogate pair": Structure("json_schema", '{"const": "\\ud800"}'),
    "half of one in an expression": Structure("regex", "\ud800"),
    "a control character": Structure("json_schema", '{"const": "a\\u0000b"}'),
    "one in a name": Structure("json_schema", '{"properties": {"\\u0001": {}}}'),
    "one in a pattern": Structure("json_schema", '{"items": {"pattern": "a\\\\x07b"}}'),
    "names that may come twice": Structure("json_schema", '{"minProperties": 2, "required": []}'),
    "an excluded number that comes back": Structure("json_schema", '{"exclusiveMinimum": 3, "maximum": 3.5}'),
    "a negative one": Structure("json_schema", '{"minimum": -3.5, "exclusiveMaximum": -3}'),
    "minus zero": Structure("json_schema", '{"minimum": -0.5, "exclusiveMaximum": 0}'),
    "one in parts": Structure("json_schema", '{"allOf": [{"exclusiveMinimum": 3}, {"exclusiveMaximum": 3.5}]}'),
    "too deep for a schema": Structure("json_schema", '{"items":' * 300 + "{}" + "}" * 300),
    "too many parts": Structure("json_schema", json.dumps({"anyOf": [{"const": i} for i in range(6000)]})),
    "rules without end": Structure("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000))),
    "an expression": Structure("regex", "(a"),
    "look-ahead": Structure("regex", "(?=a)b"),
    "no choices": Structure("choice", "[]"),
    "an empty choice": Structure("choice", '["a", ""]'),
    "a choice that is no text": Structure("choice", '["a", 1]'),
    "choices that are no JSON": Structure("choice", "yes, no"),
    "no start": Structure("grammar", 'other: "a"'),
    "a rule that is missing": Structure("grammar", "start: nothing"),
    "a special token": Structure("grammar", 'start: "a" <|end 0|>'),
    "a special token by its number": Structure("grammar", f'start: "a" <[{ENDS[0]}]>'),
    "an expression that is too deep": Structure("regex", "(" * 3000 + "a" + ")" * 3000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compile_is_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(ParameterError) as error:
        compiler.compile(REFUSED[name])
    assert error.value.field == "structure"
    assert error.value.value == REFUSED[name].kind
    assert error.value.allowed


@pytest.mark.parametrize("rule", ["r", "R"])
def test_a_grammar_as_deep_as_it_may_be_does_not_end_the_process(compiler: GrammarCompiler, rule: str) -> None:
    """Each rule refers to the next one, and the compiler descends by recursion."""
    count = grammar.MAX_PARTS - 10
    rules = "".join(f'{rule}{number}: "b" {rule}{number + 1}\n' for number in range(count))
    structure = Structure("grammar", f'start: {rule}0\n{rules}{rule}{count}: "a"')
    assert compiler.compile(structure).matcher().num_allowed(list(b"bbba")) == 3


def test_errors_use_the_name_that_the_caller_has_for_the_structure(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParameterError) as error:
        compiler.compile(Structure("regex", "(", "guided_regex"))
    assert error.value.field == "guided_regex"
    with pytest.raises(ParameterError) as error:
        Structure("regex", "", "guided_regex")
    assert error.value.field == "guided_regex"
    named, other = Structure("regex", "ab+", "guided_regex"), Structure("regex", "ab+", "regex")
    assert named == other
    assert compiler.compile(named) is compiler.compile(other), "one structure is compiled once, whatever it is called"
    monkeypatch.setattr(grammar, "MAX_TOKEN_S", 0.0)
    with pytest.raises(ParameterError) as error:
        compiler.compile(other).matcher("regex").advance(ord("a"))
    assert error.value.field == "regex"


def test_names_cannot_be_spelled_with_escapes(compiler: GrammarCompiler) -> None:
    structure = Structure("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert accepts(compiler, structure, '{"a": 1, "b": "x"}')
    assert not accepts(compiler, structure, '{"\\u0061": "x"}')


def test_parameters_take_structures_only() -> None:
    assert SamplingParams(structure=Structure("json_object")) == SamplingParams(structure=Structure("json_object"))
    with pytest.raises(ParameterError):
        SamplingParams(structure="json_object")  # type: ignore[arg-type]


def test_control_tokens_and_ids_beyond_the_tokenizer_are_never_allowed(compiler: GrammarCompiler) -> None:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for structure in (Structure("json_object"), Structure("regex", r"(?s:.)*")):
        matcher = compiler.compile(structure).matcher()
        matcher.allowed(words)
        allowed = np.flatnonzero(allowed_tokens(words, len(words) * 32)).tolist()
        assert [token for token in allowed if token > ENDS[1]] == []
        assert [token for token in ENDS if token in allowed] == ([] if structure.kind == "json_object" else list(ENDS))


def test_a_matcher_goes_back_and_tells_what_is_forced(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Structure("regex", "abc(d|e)f?")).matcher()
    assert b"".join(GrammarTokenizer().token_bytes(token) for token in matcher.forced()) == b"abc"
    before, after = np.zeros((2, -(-VOCAB // 32)), np.uint32)
    matcher.allowed(before)
    for byte in b"abcef":
        assert not matcher.is_done
        matcher.advance(byte)
    assert matcher.is_done
    assert matcher.may_end
    matcher.allowed(after)
    assert np.flatnonzero(allowed_tokens(after, VOCAB)).tolist() == list(ENDS)
    matcher.rollback(5)
    matcher.allowed(after)
    np.testing.assert_array_equal(before, after)
    assert matcher.num_allowed(list(b"abcxf")) == 3
    with pytest.raises(RequestError):
        matcher.advance(ord("x"))


def test_compiling_again_is_a_look_up_and_answers_do_not_see_each_other() -> None:
    compiler = GrammarCompiler(GrammarTokenizer(), VOCAB)
    structure = Structure("regex", "ab?")
    compiled = compiler.compile(structure)
    assert compiler.compile(Structure("regex", "ab?")) is compiled
    one, other = compiled.matcher(), compiled.matcher()
    one.advance(ord("a"))
    assert one.may_end
    assert not other.may_end
    for number in range(grammar.MAX_COMPILED):
        compiler.compile(Structure("regex", f"x{number}"))
    assert compiler.compile(structure) is not compiled


def test_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(GrammarTokenizer(), VOCAB)
    found: list[bool] = []

    def work(number: int) -> None:
        found.append(all(accepts(compiler, Structure("regex", f"x{i}"), f"x{i}") for i in range(number, number + 20)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_bans_hold_until_the_structure_leaves_nothing_else() -> None:
    constraint = constraint_of(Structure("regex", "ab?"), stops=[ord("b")], min_tokens=2, ignore_eos=True)
    constraint.advance(ord("a"))
    (mask,) = constraint.masks()  # "b" and the ends are all banned, so all of them may follow
    assert [token for token in range(VOCAB) if allows(mask, token)] == [ord("b"), *ENDS]
    constraint = constraint_of(Structure("regex", "ab*"), stops=[ord("b")], min_tokens=1, ignore_eos=True)
    constraint.advance(ord("a"))
    (mask,) = constraint.masks()
    assert [token for token in range(VOCAB) if allows(mask, token)] == [ord("b")]


def test_masks_of_a_tree_are_those_of_its_paths() -> None:
    constraint = constraint_of(Structure("regex", "a(b|c)*d"))
    tokens = [ord("a"), ord("b"), ord("d"), ENDS[0], ord("c"), ord("x"), ord("b"), 256]
    parents = [0, 1, 2, 3, 1, 5, 6, 0]
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    masks = constraint.masks(tokens, parents)
    for path, mask in zip(paths, masks, strict=True):
        np.testing.assert_array_equal(mask, constraint.mask_after(path), str(path))
    assert [constraint.num_allowed(path) for path in paths] == [0, 1, 2, 3, 4, 2, 2, 2, 1]
    np.testing.assert_array_equal(constraint.masks()[0], masks[0])  # and the answer has not moved


def test_states_without_end_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automaton has to remember where each "a" of the last 22 letters was."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 100)
    constraint, letters = constraint_of(Structure("regex", "[ab]*a[ab]{22}")), random.Random(1)

    def follow() -> None:
        for _ in range(10_000):
            constraint.advance(letters.choice(b"ab"))

    with pytest.raises(RequestError, match="too many states"):
        follow()


def test_a_token_that_takes_too_long_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = constraint_of(Structure("grammar", 'start: s\ns: s s | "a" s "b" | "a" | "b"'))
    monkeypatch.setattr(grammar, "MAX_TOKEN_S", 0.0)
    with pytest.raises(RequestError, match="took"):
        constraint.advance(ord("a"))


def test_a_grammar_beyond_its_limits_tells_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = constraint_of(Structure("regex", "a+"))

    def fail(words: object) -> None:
        raise ParameterError("structure", "a grammar", "a smaller one")

    monkeypatch.setattr(constraint._matcher, "allowed", fail)
    assert constraint.masks([97], [0])[1].all()
    assert isinstance(constraint.error, RequestError)
    assert constraint.num_allowed([97]) == 0
    assert constraint.forced(64) == []


def test_a_model_without_an_end_of_text_has_no_structured_answers() -> None:
    tokenizer = GrammarTokenizer()
    tokenizer.eos_token_ids = ()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="end of text"):
        GrammarCompiler(tokenizer, VOCAB).compile(Structure("json_object"))


def test_llguidance_is_imported_with_the_first_structure_and_its_absence_is_told() -> None:
    code = """
import sys
sys.modules["llguidance"] = None
from paceline.errors import UnsupportedError
from paceline.llm import LLM
from paceline.params import Structure
from paceline.sampling.grammar import GrammarCompiler
try:
    GrammarCompiler(None, 4).compile(Structure("json_object"))
except UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install paceline[structured]" in done.stdout, done.stderr
    code = "import sys, paceline.llm, paceline.sampling.grammar; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
