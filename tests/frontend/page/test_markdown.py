"""Markdown of a model: what it becomes, that it does no harm, and how much work it makes while it arrives."""

from typing import TYPE_CHECKING, Any

from tests.fakes.engine import FakeEngine
from tests.support.browser import ask, ended
from tests.support.scripted_server import say

if TYPE_CHECKING:
    from playwright.sync_api import Page

RENDER = """async (text) => {
    const { renderMarkdown } = await import("/page/markdown.js");
    const box = document.createElement("div");
    renderMarkdown(box, text);
    return [box.innerHTML, box.textContent];
}"""
FORMULAS = {
    r"\(a+b\)": r"<p>\(a+b\)</p>",
    r"*so* \(a*b*c_1\{\} \\ \[d\] <b>\) \*": r"<p><em>so</em> \(a*b*c_1\{\} \\ \[d\] &lt;b&gt;\) *</p>",
    r"**at \(x^*\), *not* $y^*$**": r"<p><strong>at \(x^*\), <em>not</em> $y^*$</strong></p>",
    "\\(a\nb\\)": "<p>\\(a\nb\\)</p>",
    "so\n\\[\na\n=\n- b \\\\\n# c\n\\]\n*d*": '<p>so</p><p class="plain">\\[\na\n=\n- b \\\\\n# c\n\\]</p>'
    "<p><em>d</em></p>",
    "$$\n\\{*a*\\}\n$$": '<p class="plain">$$\n\\{*a*\\}\n$$</p>',
    "- $\\{a\\}$\n- \\[b*c*d\\] e": "<ul><li>$\\{a\\}$</li><li>\\[b*c*d\\] e</li></ul>",
    "|a|\n|-|\n|\\(b*c*d\\)|": '<div class="table" tabindex="0"><table><thead><tr><th>a</th></tr></thead><tbody><tr>'
    "<td>\\(b*c*d\\)</td></tr></tbody></table></div>",
    "$5 *or* $6, $7-$8 *or* $ 9$": "<p>$5 <em>or</em> $6, $7-$8 <em>or</em> $ 9$</p>",
    r"`\(` *a* `\)` and `$` *b* `$`": "<p><code>\\(</code> <em>a</em> <code>\\)</code> and <code>$</code> <em>b</em> "
    "<code>$</code></p>",
    r"\(a *b* \[c \] \) \\(*d*\) \$*e*$": r"<p>\(a *b* \[c \] \) \(<em>d</em>\) $<em>e</em>$</p>",
    "\\(*a*\n\n*b*\\)": "<p>\\(<em>a</em></p><p><em>b</em>\\)</p>",
}

LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
HEAD = '<button class="copy-code" type="button" aria-label="Copy code">Copy</button></div><pre tabindex="0"><code>'

CASES = {
    "# One\n\nTwo *three* **four**": "<h3>One</h3><p>Two <em>three</em> <strong>four</strong></p>",
    "~~five~~": "<p><del>five</del></p>",
    "a `<b>` &lt;i&gt; &#65; &nope; \\*": "<p>a <code>&lt;b&gt;</code> &lt;i&gt; A &amp;nope; *</p>",
    "one  \ntwo<br>three": "<p>one<br>two<br>three</p>",
    "- a\n  - b\n- [x] c": '<ul><li>a<ul><li>b</li></ul></li><li><input type="checkbox" disabled="" '
    'aria-label="done">c</li></ul>',
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n\n---": "<blockquote><p>a</p></blockquote><hr>",
    "```py extra\nx < 1\n\n```": f'<div class="code-block"><div class="code-head"><span>py</span>{HEAD}x &lt; 1\n'
    "</code></pre></div>",
    "|a|b|\n|-|-:|\n|1|`2`|": '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th>'
    '</tr></thead><tbody><tr><td>1</td><td class="right"><code>2</code></td></tr></tbody></table></div>',
    "[a](https://x.org/y)": f'<p><a href="https://x.org/y" title="https://x.org/y" {LINK}>a</a></p>',
    "[a][b]\n\n[b]: http://x.org": f'<p><a href="http://x.org/" title="http://x.org/" {LINK}>a</a></p>',
    "![a](http://x.org/y.png)": f'<p><a href="http://x.org/y.png" title="http://x.org/y.png" {LINK}>image: a</a></p>',
}

HARMFUL = (
    "<img src=x onerror=hacked()>",
    "<script>hacked()</script>",
    "<iframe src='javascript:parent.hacked()'></iframe>",
    "<div onmouseover=hacked()>a</div>\n",
    "a <svg onload=hacked()> b",
    "[a](javascript:hacked())",
    "[a](&#106;avascript:hacked())",
    "[a](<java\tscript:hacked()>)",
    "[a](data:text/html,<script>hacked()</script>)",
    "[a](vbscript:hacked)",
    "[a](/admin/scheduler)",
    "[a](//elsewhere.example)",
    "<javascript:hacked()>",
    "[a][b]\n\n[b]: javascript:hacked()",
    "![a](javascript:hacked())",
    "![a](http://127.0.0.1:9/x.png)",
    '![a](x.png "onerror=hacked()")',
    "```<img/src=x>\n</code></pre><img src=x onerror=hacked()>\n```",
    "|<img src=x onerror=hacked()>|\n|-|\n|<script>hacked()</script>|",
    "`<img src=x onerror=hacked()>`",
    "**<style>*{display:none}</style>**",
    "<form action=/x><input name=a></form>",
)

BEYOND_BOUNDS = {
    "a deep quote": ">" * 9000 + " x",
    "a deep list": "1. " * 3000 + "x",
    "many emphases": "_a" * 6000,
    "many brackets": "[" * 6000,
    "brackets of formulas": "\\(" * 6000,
    "lines that open formulas": "\\[\n" * 12000,
    "a long block": "word and word\n" * 4000,
    "a huge table": "|a" * 60 + "|\n" + "|-" * 60 + "|\n" + ("|1" * 60 + "|\n") * 100,
    "a wide table": "|a" * 6000 + "|\n" + "|-" * 6000 + "|\n",
}


def test_markdown_becomes_nodes(modules: "Page") -> None:
    assert {text: modules.evaluate(RENDER, text)[0] for text in CASES} == CASES


def test_formulas_are_shown_as_they_are_written(modules: "Page") -> None:
    assert {text: modules.evaluate(RENDER, text)[0] for text in FORMULAS} == FORMULAS


def test_harmful_markdown_is_shown_as_text(page: "Page", engine: FakeEngine) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("() => { window.hacked = () => { window.harm = true; }; }")
    say(engine, "\n\n".join(HARMFUL))
    page.get_by_label("Max tokens").fill("2000")
    ask(page, "do harm")
    ended(page, 1)
    answer = page.locator(".answer")
    assert answer.locator("img, script, iframe, svg, style, form, object, link, [src], [style]").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('.answer *')].flatMap((one) => one.getAttributeNames())"
        ".filter((name) => name.startsWith('on'))"
    ) == []  # fmt: skip
    assert page.evaluate("[...document.querySelectorAll('.answer a')].map((one) => one.href)") == [
        "http://127.0.0.1:9/x.png"
    ]
    shown = answer.text_content() or ""
    for text in ("<img src=x onerror=hacked()>", "<script>hacked()</script>", "[a](javascript:hacked())"):
        assert text in shown
    assert page.evaluate("window.harm") is None
    paths = [url.split("/", 3)[3] for url in asked]
    assert set(paths) <= {"v1/chat/completions", "health/ready"}, "nothing else was loaded"


def test_text_beyond_the_bounds_is_shown_as_it_is(modules: "Page") -> None:
    for name, text in BEYOND_BOUNDS.items():
        html, shown = modules.evaluate(RENDER, text)
        assert shown == text, name
        assert html.count("<") < 10, name


def test_streamed_markdown_equals_the_whole(modules: "Page") -> None:
    """Random documents in random pieces end as they do at once, and never show a stale block."""
    wrong = modules.evaluate(
        """async () => {
            const { MarkdownView, renderMarkdown } = await import("/page/markdown.js");
            let state = 7;
            const random = (below) => (state = (state * 48271) % 2147483647) % below;
            const parts = ["a\\n", "\\n", "- b\\n", "  - c\\n", "1. d\\n", "2. e\\n", "> f\\n", "# g\\n", "#", "```\\n",
                "~~~\\n", "`h`", "**i**", " ", "    j\\n", "|k|l|\\n", "|-|-|\\n", "===\\n", "---\\n", "<div>\\n",
                "<!-- \\n", "-->\\n", "[m]: http:x\\n", "[m] ", "\\t", "* ",
                "word word ", "\\n\\n", "\\n\\n", "<b>", "\\\\", "\\\\(", "\\\\)", "\\\\[\\n", "\\\\]", "$", "$$\\n"];
            const wrong = [];
            for (let round = 0; round < 300; round++) {
                const text = Array.from({ length: 3 + random(25) }, () => parts[random(parts.length)]).join("");
                const [streamed, whole] = [document.createElement("div"), document.createElement("div")];
                const view = new MarkdownView(streamed);
                for (let start = 0; start < text.length;) {
                    const size = 1 + random(9);
                    view.text += text.slice(start, start + size);
                    view.render();
                    start += size;
                }
                view.end();
                renderMarkdown(whole, text);
                if (streamed.innerHTML !== whole.innerHTML) wrong.push([text, streamed.innerHTML, whole.innerHTML]);
            }
            return wrong;
        }"""
    )
    assert wrong == []


WORK = """async ([text, step]) => {
    const { MarkdownView } = await import("/page/markdown.js");
    const view = new MarkdownView(document.createElement("div"));
    for (let start = 0; start < text.length; start += step) {
        view.text += text.slice(start, start + step);
        view.render();
    }
    view.end();
    return view.lexed / text.length;
}"""


LONG = {
    "paragraphs": "Some words that make up a paragraph of an answer, and a few more of them.\n\n" * 650,
    "code": "```python\n" + "value = compute(first, second)  # a line of code\n" * 1000 + "```\n",
    "mixed": "Steps:\n```\nx = 1\n```\n\n# Title\n\n- one\n- two\n\n" * 900,
}


def test_work_grows_with_the_length_of_an_answer(modules: "Page") -> None:
    """A 10,000-token answer in 2,500 pieces: lexed whole each time, each character would be lexed 1,250 times."""
    work = {name: modules.evaluate(WORK, [text, len(text) // 2500]) for name, text in LONG.items()}
    assert {name: times for name, times in work.items() if times > 20} == {}


def test_text_is_drawn_at_most_once_a_frame(modules: "Page") -> None:
    drawn: Any = modules.evaluate(
        """async () => {
            const { MarkdownView } = await import("/page/markdown.js");
            const view = new MarkdownView(document.createElement("div"));
            for (let count = 0; count < 1000; count++) view.push("word ");
            const before = view.lexed;
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return [before, view.lexed, view.root.textContent.length];
        }"""
    )
    assert drawn == [0, 5000, 5000]
