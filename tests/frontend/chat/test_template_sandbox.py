"""Limits of the template sandbox, and how templates that exceed them are stopped."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.frontend.chat import template_sandbox
from tandem.frontend.chat.template_sandbox import RenderError, SandboxedTemplates
from tests.fakes.clock import FakeClock


def render(source: str, **variables: Any) -> str:
    sandbox = SandboxedTemplates()
    return sandbox.render(sandbox.compile_template(source), variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{% for x in xs %}{{ x }}{{ '' if loop.last else ',' }}{% endfor %}", "a,b,c"),
        ("{% for x in xs if x != 'b' %}{{ loop.index }}{{ x }}{% endfor %}", "1a2c"),
        ("{% for x in xs %}{% if x == 'b' %}{% break %}{% endif %}{{ x }}{% endfor %}", "a"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in xs %}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}", "3b 3ac 3b "),
        ("{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) + f('b') }}", "<1><b>"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ {'a': 'ü<'} | tojson }}{{ [1] | tojson(indent=2) }}", '{"a": "ü<"}[\n  1\n]'),
        ("{{ dict(a=1) }}{{ dict.fromkeys(['x'], 0) }}", "{'a': 1}{'x': 0}"),
        ("{{ '-'.join(xs) }}{{ xs | join('+') }}{{ 'aXa'.replace('X', 'b') }}", "a-b-ca+b+caba"),
        ("{{ '%s and %d' % ('a', 2) }}{{ '{:>3}'.format(1) }}{{ 'x' * 3 }}{{ 2 ** 8 }}", "a and 2  1xxx256"),
        ("{{ xs | map('upper') | list | length }}", "3"),
    ],
)
def test_sandbox_renders_what_templates_use(source: str, expected: str) -> None:
    assert render(source, xs=["a", "b", "c"]) == expected


DOUBLE = "{% set ns = namespace(x='0123456789') %}{% for i in range(99) %}{% set ns.x %}VALUE{% endset %}{% endfor %}"
GROWING = [
    DOUBLE.replace("VALUE", "{{ ns.x }}{{ ns.x }}"),
    "{% set ns = namespace(x='0123456789') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='0123456789') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set x = 'a' * 10**9 %}",
    "{% set x = 10**9 * 'a' %}",
    "{% set x = [0] * 10**9 %}",
    "{% set x = 'a' | center(10**9) %}",
    "{% set x = 'a'.ljust(10**9) %}",
    "{% set x = [1] | batch(10**9, 0) | list %}",
    "{% set x = ['a'] | map('center', 10**9) | list %}",
    "{% set x = '%1000000000d' % 1 %}",
    "{% set x = '{:1000000000}'.format(1) %}",
    "{% set x = '%1000000000d' | format(1) %}",
    "{% set x = ('a' * 9999).replace('', 'b' * 99999) %}",
    "{% set x = ('a' * 9999) | replace('a', 'b' * 99999) %}",
    "{% set x = ('b' * 99999).join(['a'] * 9999) %}",
    "{% set x = (['a'] * 9999) | join('b' * 99999) %}",
    "{% set x = 7 ** 7 ** 7 ** 7 ** 7 ** 7 ** 7 %}",
    "{% set x = range(10**9) %}",
    "{% for i in range(99999) %}{% for i in range(999) %}" + "a" * 99 + "{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", GROWING)
def test_unbounded_value_is_rejected_before_it_is_built(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARS", 10**6)
    with pytest.raises(RenderError):
        render(source)


NESTED = "[" * 40 + "1, " * 2000 + "]" * 40
"""A list that takes 320 million characters of JSON with an indent of 4,096."""


@pytest.mark.parametrize(
    "source",
    [
        f"{{{{ {NESTED} | tojson(indent=4096) }}}}",
        f"{{% set x = {NESTED} | tojson(indent=4096) %}}",
        f"{{% if {NESTED} | tojson(indent=4096) is string %}}{{% endif %}}",
        f"{{% autoescape {NESTED} | tojson(indent=4096) %}}{{% endautoescape %}}",
        f"{{% for x in [{NESTED} | pprint] %}}{{% endfor %}}",
        f"{{{{ [{NESTED} | list | tojson, 1 is divisibleby 1][1] }}}}",
    ],
)
def test_compiling_a_template_calls_no_filter(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles it has no limit; the one that renders it is killed."""
    called: list[object] = []
    monkeypatch.setattr(template_sandbox.json, "dumps", lambda *given, **_: called.append(given) or "")
    sandbox = SandboxedTemplates()
    for name in sandbox.filters:
        monkeypatch.setitem(sandbox.filters, name, lambda *given, **_: called.append(given) or "")
    sandbox.compile_template(source)
    assert called == []


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    ],
)
def test_endless_template_is_stopped_at_the_deadline(source: str) -> None:
    clock = FakeClock()

    def ticking() -> float:
        clock.now += 0.01
        return clock.now

    sandbox = SandboxedTemplates(max_seconds=1.0, clock=ticking)
    with pytest.raises(RenderError, match=r"\b1 s\b"):
        sandbox.render(sandbox.compile_template(source), {})
    assert (
        sandbox.render(sandbox.compile_template("the next one has its own time"), {}) == "the next one has its own time"
    )


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ xs.append(1) }}", "unsafe"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{% set ns = namespace(_a=1) %}", "underscore"),
        ("{{ lipsum() }}", "undefined"),
        ("{% include 'other' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{% if %}", "line 1"),
        ("{{ missing.field }}", "undefined"),
        ("x" * (2**20 + 1), "characters"),
    ],
)
def test_failing_template_reports_its_reason(source: str, match: str) -> None:
    with pytest.raises(RenderError, match=match):
        render(source, xs=[])


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "m.role",
            "m.missing is defined",
            "m.items is callable",
            "m.get('role')",
            "m.keys() | list",
            "m.__class__ is defined",
        ),
        *("m['items']", "(m.format)('a')", "n.text", "n.number", "n.missing is defined", "n.__class__ is defined"),
        *("n._x is defined", "n.list[0]", "n.upper()", "(n.text.format)('a')", "n.m.role"),
    ],
)
def test_attributes_are_those_of_jinjas_own_sandbox(expression: str) -> None:
    """Members of messages and of namespaces take a shorter way to the same value."""
    body = "{% set n = namespace(text='t{}', number=1, list=[2], upper=m.get, m=m) %}{{ " + expression + " }}"
    values = "{{ loop.index }}{{ loop.first }}{{ loop.nextitem }}{{ loop.length }}{{ loop._x }}"
    loops = "{% for x in [1, 2] %}" + values + "{% endfor %}"
    variables = {"m": {"role": "user", "items": "own", "format": "text"}}
    results: list[str] = []
    for environment in (SandboxedTemplates(clock=lambda: 0.0), ImmutableSandboxedEnvironment()):
        for source in (body, loops):
            try:
                results.append(environment.from_string(source).render(variables))
            except Exception as error:
                results.append(type(error).__name__)
    assert results[:2] == results[2:]
