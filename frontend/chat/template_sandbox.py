"""Sandbox for the Jinja templates of checkpoints.

A template is a program. It has no access to Python. In addition to jinja's own sandbox, every loop iteration and every
call checks the deadline, and most operations with a result longer than MAX_CHARS are rejected before they run. That
gives templates clear errors, but bounds neither time nor memory: a single call on values within these bounds, such as
`tojson` of a list with many references to one list, may take minutes and gigabytes, and cannot be interrupted.
Templates are therefore rendered in a process that can be killed (`render_worker`).
"""

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 64 * 2**20
"""Maximum length of a string that a template builds, including its output."""
MAX_SECONDS = 5.0
"""Time limit of a render, in seconds, checked at each loop iteration and call."""
TOOK_TOO_LONG = "it took too long and was stopped"
MAX_SOURCE_CHARS = 2**20
MAX_ITEMS = 2**20
"""Maximum length of a list or tuple that a template builds."""
MAX_BITS = 4096
"""Maximum bits of an integer that a template computes."""
MAX_WIDTH = 4096
"""Maximum width, indent or count argument of a filter or method."""

_WIDE_FORMAT = re.compile(r"\d{5}")
_BOUNDED_FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "tojson", "pprint", "format", "replace", "join")
_BOUNDED_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join")
_DICT_ATTRIBUTES = frozenset(dir(dict))
_PLAIN = frozenset((str, int, float, bool, list, dict))
"""Types of namespace attributes that jinja's sandbox need not check."""
_LOOP_VALUES = frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem"))
"""Attributes of `loop` that are plain values."""


class RenderError(Exception):
    """A template is invalid, rejected its input or was stopped."""


class _StoppedError(TemplateError):
    """A template took too long or built too large a value."""


class _GenerationTag(Extension):
    """Tag `{% generation %}`, which marks the model's own text for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """Function `dict(...)` without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Function `namespace(...)` with attributes that cannot override Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a parameter named `self`, a template may pass a keyword of that name.
        this, *given = args
        for name in dict(*given, **kwargs):
            _check_attribute(name)
        Namespace.__init__(*(this, *given), **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError(f"the namespace attribute {name!r} starts with an underscore; rename it")


class SandboxedTemplates(ImmutableSandboxedEnvironment):
    """Jinja environment of chat templates, with transformers' settings.

    Runs one render at a time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_seconds: float = MAX_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._max_seconds = max_seconds
        self._clock = clock
        self._deadline = 0.0
        self._lock = threading.Lock()
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self.filters["tojson"] = _tojson
        for name in _BOUNDED_FILTERS:
            self.filters[name] = _bounded(self.filters[name], name)

    def compile_template(self, source: str) -> Template:
        """Compile a template. Raises RenderError if the source is invalid or too long."""
        if len(source) > MAX_SOURCE_CHARS:
            raise RenderError(f"it has {len(source)} characters, at most {MAX_SOURCE_CHARS}")
        with _failures():
            return self.from_string(source)

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render a template. Raises RenderError if it fails or exceeds a limit."""
        with self._lock, _failures():
            self._deadline = self._clock() + self._max_seconds
            parts: list[str] = []
            size = 0
            for part in template.generate(variables):
                size += len(part)
                if size > MAX_CHARS:
                    _check_size(size)
                parts.append(part)
            return "".join(parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute` as jinja defines it.

        Fast path for common attributes, mostly fields of messages, for which jinja would catch an exception first.
        """
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_VALUES:
            return getattr(obj, attribute)
        if kind is _Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    @property
    def in_time(self) -> bool:
        """Return True before the deadline. Raises _StoppedError after it.

        Evaluated at every loop iteration.
        """
        self._check_time()
        return True

    def _check_time(self) -> None:
        if self._clock() > self._deadline:
            raise _StoppedError(f"{TOOK_TOO_LONG} (at most {self._max_seconds:g} s)")

    def joined(self, *parts: Any) -> str:
        """Concatenate values like the operator `~`. Raises _StoppedError if the result is too long."""
        return self.concat([str(part) for part in parts])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of macros and blocks. Raises _StoppedError if the result is too long."""
        found = list(parts)
        _check_size(sum(map(len, found)))
        return "".join(found)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        _instrument(source)
        return super()._generate(source, name, filename, defer_init)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            _check_size(len(left) + len(right))
            return left + right
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The parameters have jinja's names: templates may pass keyword arguments with any other name.
        __self._check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and (name := __obj.__name__) in _BOUNDED_METHODS:
            _check_growth(name, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


@contextmanager
def _failures() -> Iterator[None]:
    """Convert any exception of a template to a RenderError."""
    try:
        yield
    except RenderError:
        raise
    except MemoryError:
        raise RenderError("it ran out of memory") from None
    except RecursionError:
        raise RenderError("it recurses too deeply") from None
    except Exception as error:  # Templates are programs, so they may raise anything.
        raise RenderError(_reason(error)) from error


def _raise_exception(message: str) -> None:
    raise RenderError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _instrument(template: nodes.Template) -> None:
    """Add checks of the deadline to loops and of the size to operators `~`.

    Disables jinja's constant folding, which calls filters at compile time in an unlimited process.
    """
    for call in template.find_all((nodes.Filter, nodes.Test)):
        call.as_const = _not_constant  # type: ignore[method-assign]
    for loop in template.find_all(nodes.For):
        tick = nodes.EnvironmentAttribute("in_time")
        loop.test = tick if loop.test is None else nodes.And(tick, loop.test)
    _replace_concats(template)


def _not_constant(*_: Any, **__: Any) -> Any:
    raise nodes.Impossible


def _replace_concats(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_without_concat(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concats(value)
    if not isinstance(value, nodes.Concat):
        return value
    call = nodes.Call(nodes.EnvironmentAttribute("joined"), value.nodes, [], None, None)
    return call.set_lineno(value.lineno)


def _bounded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a filter with a check of its arguments.

    Jinja may pass the context as an extra first argument.
    """
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if name == "join" and not isinstance(args[skip], str):
            args = (*args[:skip], list(args[skip]), *args[skip + 1 :])
        _check_growth(name, args[skip], args[skip + 1 :], kwargs)
        return function(*args, **kwargs)

    return checked


def _check_growth(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Reject calls of filters and string methods with a result that could be far larger than the arguments."""
    given = (*args, *kwargs.values())
    text = value if isinstance(value, str) else ""
    if name == "replace" and len(given) >= 2:
        old, new = str(given[0]), str(given[1])
        _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    elif name == "join":
        _check_join(value, given)
    elif name == "format":
        _check_format(text)
    elif any(isinstance(item, int) and item > MAX_WIDTH for item in given):
        raise _StoppedError(f"it calls {name} with a number above {MAX_WIDTH}")


def _check_join(value: Any, given: tuple[Any, ...]) -> None:
    """Check the size of a join.

    The filter gets the items first and then the separator; the method gets them in reverse order.
    """
    items, separator = (given[0], value) if isinstance(value, str) and given else (value, given[0] if given else "")
    if isinstance(items, list | tuple | str):
        size = sum(len(item) if isinstance(item, str) else 1 for item in items)
        _check_size(size + len(items) * len(str(separator)))


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(len(left) + len(right), isinstance(left, str))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(count, int):
                _check_size(len(sequence) * count, isinstance(sequence, str))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise _StoppedError(f"it computes a number of more than {MAX_BITS} bits")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise _StoppedError("it formats with a width of five digits or more")


def _check_size(size: int, is_text: bool = True) -> None:
    limit = MAX_CHARS if is_text else MAX_ITEMS
    if size > limit:
        raise _StoppedError(f"it builds more than {limit} {'characters' if is_text else 'items'} and was stopped")


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return f"{text[:500]} (line {line})" if line else text[:500]
