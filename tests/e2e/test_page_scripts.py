"""What the page's scripts compute: events out of bytes, elements out of Markdown, and what of a text was drafted."""

from __future__ import annotations

import html
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCRIPTS = (
    "texts.js",
    "storage.js",
    "elements.js",
    "markdown.js",
    "answers.js",
    "chats.js",
    "settings.js",
    "messages.js",
)
FOLDER = resources.files("paceline.serve.page")


@pytest.fixture(scope="module")
def scripts(browser: Browser) -> Iterator[Page]:
    """An empty page with the scripts."""
    page = browser.new_page()
    page.set_content("<main></main>")
    for name in SCRIPTS:
        page.add_script_tag(content=FOLDER.joinpath(name).read_text("utf-8"))
    yield page
    page.close()


EVENTS_OF = """([bytes, cuts]) => {
    const reader = new EventReader();
    const events = [];
    for (let index = 0; index <= cuts.length; index += 1) {
        const piece = bytes.slice(cuts[index - 1] ?? 0, cuts[index] ?? bytes.length);
        events.push(...reader.feed(new Uint8Array(piece)));
    }
    return events.map(({name, data}) => [name, data]);
}"""

STREAM = (
    ": a comment\r\n\r\n"
    'data: {"a": "한글 😀"}\r\n\r\n'
    "event: error\ndata: one\ndata:two\n\n"
    "id: 7\ndata\n\n"
    "data: : x\r\r"
    "event: lost\n\n"
    "data: end\n\n"
    "data: not complete\n"
).encode()
EVENTS = [["", '{"a": "한글 😀"}'], ["error", "one\ntwo"], ["", ""], ["", ": x"], ["", "end"]]


def test_events_do_not_depend_on_how_the_bytes_are_cut(scripts: Page) -> None:
    results = scripts.evaluate(
        f"""bytes => {{
            const eventsOf = {EVENTS_OF};
            const results = [];
            for (let one = 0; one <= bytes.length; one += 1)
                for (let two = one; two <= bytes.length; two += 1)
                    results.push(JSON.stringify(eventsOf([bytes, [one, two]])));
            return [...new Set(results)].map((text) => JSON.parse(text));
        }}""",
        list(STREAM),
    )
    assert results == [EVENTS]


def markdown(scripts: Page, text: str, steps: int | None = None) -> str:
    """The elements of a text, drawn at once or growing by ``steps`` characters."""
    result = scripts.evaluate(
        """([text, steps]) => {
            const message = { role: "assistant", text: "", drafted: [] };
            const body = document.createElement("div");
            const growing = new GrowingMarkdown(body, message);
            for (let at = 0; at < text.length; at += steps) {
                grow(message, text.slice(at, at + steps), false);
                growing.draw();
            }
            for (const head of body.querySelectorAll(".code-head")) head.remove();
            body.normalize();
            return body.innerHTML;
        }""",
        [text, steps or max(1, len(text))],
    )
    return str(result).replace(' tabindex="0"', "").replace(' target="_blank" rel="noopener noreferrer"', "")


CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("# Big\ntext", "<h3>Big</h3><p>text</p>"),
    ("#hash tag", "<p>#hash tag</p>"),
    (
        "**bold** and *thin* and __bold__ and _thin_",
        "<p><strong>bold</strong> and <em>thin</em> and <strong>bold</strong> and <em>thin</em></p>",
    ),
    ("***both***", "<p><strong><em>both</em></strong></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("2 * 3 * 4 and a*b", "<p>2 * 3 * 4 and a*b</p>"),
    ("snake_case_name and __init__.py", "<p>snake_case_name and <strong>init</strong>.py</p>"),
    ("**open", "<p>**open</p>"),
    ("`a*b*c` and ``x`y``", "<p><code>a*b*c</code> and <code>x`y</code></p>"),
    (r"\*not\* thin, C:\dir", r"<p>*not* thin, C:\dir</p>"),
    ("[name](https://example.com/a_(b)_c)", '<p><a href="https://example.com/a_(b)_c">name</a></p>'),
    (
        "see https://example.com/x, or (https://example.com/y).",
        '<p>see <a href="https://example.com/x">https://example.com/x</a>, or (<a href="https://example.com/y">https://example.com/y</a>).</p>',
    ),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ('[x](https://e.com/" onclick="y)', '<p>[x](<a href="https://e.com/">https://e.com/</a>" onclick="y)</p>'),
    ("- a\n- b\n  more\n  - c\n- d", "<ul><li>a</li><li>b\nmore<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n\n2. b\n\n   more\n\nafter", "<ol><li>a</li><li>b\nmore</li></ol><p>after</p>"),
    ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
    (
        "> said **so**\n> - a\n\nx",
        "<blockquote><p>said <strong>so</strong></p><ul><li>a</li></ul></blockquote><p>x</p>",
    ),
    ("---\n***", "<hr><hr>"),
    (
        '```python\nif a:\n    b("<i>")\n```\nx',
        '<div class="code"><pre><code>if a:\n    b("&lt;i&gt;")</code></pre></div><p>x</p>',
    ),
    ("```\n# no heading\n\n- no list", '<div class="code"><pre><code># no heading\n\n- no list</code></pre></div>'),
    ("````\n```\n````", '<div class="code"><pre><code>```</code></pre></div>'),
    (
        "1. a\n   ```sh\n   ls\n   ```\n2. b",
        '<ol><li>a</li></ol><div class="code"><pre><code>ls</code></pre></div><ol start="2"><li>b</li></ol>',
    ),
    (
        "| a | b |\n|---|:-:|\n| 1 | **2** |\n| \\| | |",
        '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td><strong>2</strong></td></tr><tr><td>|</td><td></td></tr></tbody></table></div>",
    ),
    (
        "a | b\n--|--\n1 | 2",
        '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>",
    ),
    ("a | b, not a table", "<p>a | b, not a table</p>"),
    (
        "<b>x</b> &amp; <script>alert(1)</script>",
        "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp; &lt;script&gt;alert(1)&lt;/script&gt;</p>",
    ),
    ("한국어 **굵게**는 _기울임_ 😀", "<p>한국어 <strong>굵게</strong>는 <em>기울임</em> 😀</p>"),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[text[:24] for text, _ in CASES])
def test_markdown(scripts: Page, text: str, expected: str) -> None:
    assert markdown(scripts, text) == expected


def test_a_text_that_grows_is_drawn_as_if_it_had_come_at_once(scripts: Page) -> None:
    text = "\n\n".join(text for text, _ in CASES)
    whole = markdown(scripts, text)
    assert html.escape("<i>", quote=False) in whole
    for steps in (1, 2, 3, 7, 50):
        assert markdown(scripts, text, steps) == whole


@pytest.mark.parametrize("mark", ["*a ", "_a ", "`a ", "``` ", "[a", "**a ", "*", "> ", "- ", "|", "(http://a "])
def test_endless_marks_break_nothing(scripts: Page, mark: str) -> None:
    assert markdown(scripts, f"x{mark}\n" + mark * (20_000 // len(mark)) + "\n\nend").endswith("<p>end</p>")


PIECES: list[list[Any]] = [
    ["a **b", False],
    ["c** d", True],
    [" e", True],
    ["\n- f", False],
    ["\n- `g`", True],
    ["", True],
]


def test_marks_what_was_drafted_through_all_markdown(scripts: Page) -> None:
    drafted, drawn = scripts.evaluate(
        """pieces => {
            const message = { role: "assistant", text: "", drafted: [] };
            for (const [text, isDrafted] of pieces) grow(message, text, isDrafted);
            const body = document.createElement("div");
            new GrowingMarkdown(body, message).draw();
            return [message.drafted, body.innerHTML.replaceAll(' class="drafted"', "")];
        }""",
        PIECES,
    )
    assert drafted == [5, 12, 16, 22]
    assert drawn == (
        "<p>a <strong>b<span>c</span></strong><span> d e</span></p>"
        "<ul><li>f</li><li><code><span>g</span></code></li></ul>"
    )


def test_a_file_of_chats_is_checked_before_it_is_taken(scripts: Page) -> None:
    good = '{"id":"1","title":"","updated":1,"skipped":0,"messages":[{"role":"user","text":"x"}]}'
    for chats, count in (
        (f"[{good}]", 1),
        ("[]", 0),
        ("[null]", None),
        ("{}", None),
        (f'[{good},{{"id":1}}]', None),
        (good.replace('"user"', '"root"').join("[]"), None),
        (good.replace('"x"', "5").join("[]"), None),
    ):
        imported = scripts.evaluate(
            """text => {
                const kept = new Map();
                const storage = {
                    getItem: (key) => kept.get(key) ?? null,
                    setItem: (key, value) => kept.set(key, value),
                    removeItem: (key) => kept.delete(key),
                };
                try {
                    return new ChatStore(storage).import(text);
                } catch (error) {
                    return error instanceof TypeError ? null : String(error);
                }
            }""",
            f'{{"kind":"paceline.chats/1","chats":{chats}}}',
        )
        assert imported == count, chats
