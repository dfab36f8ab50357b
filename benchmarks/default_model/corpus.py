"""Corpus of the standard library functions that the default model learns.

It has one JSON row per function. The functions that introspection finds depend on the Python that runs it, so the rows
are collected once and kept in `corpus.jsonl` next to this file; training and judging read that file on whatever Python
they run.

    python -m benchmarks.default_model.corpus            # collects corpus.jsonl again
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).with_name("corpus.jsonl")


def listed(block: str) -> list[str]:
    """Split a block of text into words, since long lists are more readable as text."""
    return block.split()


# In this order: a function reachable through two modules is kept under the first.
# Modules with an effect on import (this, antigravity, idlelib, turtle) and test packages are not here.
MODULES = listed("""
builtins os os.path shutil textwrap string re math cmath random statistics json csv itertools functools operator
collections heapq bisect copy pprint enum time calendar datetime locale gettext glob fnmatch linecache tempfile
filecmp fileinput stat pathlib io sys platform getpass getopt argparse shlex subprocess signal threading queue
multiprocessing concurrent.futures asyncio contextlib contextvars types typing dataclasses abc atexit traceback
warnings logging logging.config inspect dis ast tokenize token keyword symtable pickle pickletools copyreg shelve
marshal dbm sqlite3 zlib gzip bz2 lzma zipfile tarfile hashlib hmac secrets base64 binascii quopri struct codecs
unicodedata difflib html html.entities xml.sax.saxutils xml.etree.ElementTree xml.dom.minidom urllib.parse
urllib.request http.client http.cookiejar email.utils email.header email.charset email.encoders email.message
mimetypes socket ssl select selectors ipaddress uuid webbrowser configparser tomllib plistlib netrc cProfile pstats
timeit trace tracemalloc faulthandler gc weakref sysconfig site importlib importlib.metadata importlib.resources
importlib.util pkgutil modulefinder runpy zipimport zipapp py_compile compileall code codeop pdb doctest unittest
unittest.mock decimal fractions numbers colorsys wave array mmap errno resource pwd grp pty tty termios fcntl
curses readline cmd sched smtplib ftplib poplib imaplib wsgiref.util wsgiref.simple_server xmlrpc.client
graphlib zoneinfo reprlib rlcompleter tabnanny pyclbr stringprep venv ensurepip optparse bdb ctypes ctypes.util
wsgiref.headers
""")

# Types whose methods people ask about as functions ("str.split").
METHODS_OF = listed("""
builtins.str builtins.bytes builtins.bytearray builtins.list builtins.dict builtins.set builtins.frozenset
builtins.tuple builtins.int builtins.float builtins.complex builtins.memoryview
collections.deque collections.OrderedDict collections.Counter pathlib.Path datetime.datetime datetime.date
datetime.timedelta decimal.Decimal fractions.Fraction threading.Thread threading.Event threading.Condition
queue.Queue argparse.ArgumentParser logging.Logger sqlite3.Connection sqlite3.Cursor socket.socket
subprocess.Popen random.Random zipfile.ZipFile tarfile.TarFile configparser.RawConfigParser string.Formatter
contextlib.ExitStack asyncio.Queue asyncio.Task asyncio.Future unittest.TestCase ipaddress.IPv4Address
ipaddress.IPv4Network array.array mmap.mmap difflib.SequenceMatcher email.message.Message
xml.etree.ElementTree.Element xml.etree.ElementTree.ElementTree inspect.Signature types.MappingProxyType
concurrent.futures.Executor concurrent.futures.Future multiprocessing.Process tempfile.SpooledTemporaryFile
statistics.NormalDist
""")

# Modules whose classes are called like functions ("itertools.chain").
CALLED_CLASSES = ("builtins", "itertools", "functools", "collections", "operator", "contextlib", "weakref")

MAX_SIGNATURE = 60
MAX_SENTENCE = 170
ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "No.", "approx.")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
MARKUP = re.compile(r">>>|::|[^,] \.\.\.|->|[{}|\\]|<\w|=\s*=|https?:")
OLD_STYLE = re.compile(
    r"(?P<call>[\w.]+\((?P<args>[^()]*(?:\([^()]*\)[^()]*)*)\))\s*(?:-+>|--|- |=>|:|\n|$)\s*(?P<rest>.*)\Z", re.S
)


@dataclass(frozen=True)
class Function:
    """One row of the corpus.

    It has the function's full name, its call form and the first sentence of its docstring.
    """

    module: str
    name: str
    signature: str
    sentence: str

    @property
    def dotted(self) -> str:
        """Name that people write: that of a builtin without its module."""
        return self.name if self.module == "builtins" else f"{self.module}.{self.name}"

    @property
    def answer(self) -> str:
        """Sentence that the model should answer with."""
        return f"{self.dotted}{self.signature}: {self.sentence}"


def first_sentence(paragraph: str) -> str:
    """Cut a paragraph after its first full sentence, and put it on one line."""
    # "Parse a URL into 6 components:" is followed by a picture of them.
    text = " ".join(re.split(r":\n\s*<", paragraph, maxsplit=1)[0].split())
    for stop in re.finditer(r"[.!?](?=\s|$)", text):
        head = text[: stop.end()]
        if not head.endswith(ABBREVIATIONS) and not re.search(r"\b[A-Z]\.$", head):
            return head
    return text.rstrip(" :;,-") + "." if text else ""


def acceptable(sentence: str) -> bool:
    """Return True for a full sentence of prose.

    The model should not learn tables, pointers to other documentation or fragments.
    """
    if len(re.findall(r"[A-Za-z]+", sentence)) < 3 or len(sentence) > MAX_SENTENCE or not sentence.isascii():
        return False
    if not re.match(r"[A-Z][A-Za-z-]*[ ,;(']", sentence) or MARKUP.search(sentence):
        return False
    if re.match(r"(See|Alias|Deprecated|Internal|Initialize self|Undocumented|Helper)\b", sentence):
        return False
    quotes = re.findall(r"(?<![A-Za-z])'|'(?![a-z])", sentence)
    return sentence.count("(") == sentence.count(")") and len(quotes) % 2 == 0


def shorten(parameters: list[str]) -> str:
    """Format the parameters in parentheses, and cut long ones at a comma with `...`."""
    whole = f"({', '.join(parameters)})"
    while len(whole) > MAX_SIGNATURE and parameters:
        parameters = parameters[:-1]
        whole = f"({', '.join([*parameters, '...'])})"
    return whole


def introspected(function: Any, is_method: bool) -> str | None:
    """Format the call without annotations.

    Returns None if Python does not know the signature. A default without a short plain form is shown as `...`.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return None
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    if is_method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    plain = (type(None), bool, int, float, str, bytes, tuple)
    parts = []
    for p in parameters:
        shown = p.default is p.empty or (isinstance(p.default, plain) and len(repr(p.default)) <= 20)
        parts.append(str(p) if shown else f"{p.name}=...")
    starred = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if starred and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        parts.insert(starred[0], "*")
    return shorten(parts)


def parse_doc(doc: str) -> tuple[str | None, str]:
    """Split a docstring into its call form, if any, and its first sentence.

    Old-style docstrings open with the call form.
    """
    paragraphs = [p for p in re.split(r"\n\s*\n", doc.strip()) if p.strip()]
    if not paragraphs:
        return None, ""
    match = OLD_STYLE.match(paragraphs[0])
    if match is None:
        return None, first_sentence(paragraphs[0])
    arguments = " ".join(match["args"].split())
    rest = match["rest"].strip()
    if re.match(r"(an?|new|the) ", rest) and len(first_sentence(rest).split()) >= 5:
        rest = rest[0].upper() + rest[1:]
    # "-> str" and "-> new list" say the result's type and no sentence; the prose is then the next paragraph.
    if not acceptable(first_sentence(rest)):
        rest = re.split(r"\n", rest, maxsplit=1)[1] if "\n" in rest else ""
        rest = rest if acceptable(first_sentence(rest)) else (paragraphs[1] if len(paragraphs) > 1 else "")
    return shorten([part.strip() for part in arguments.split(", ")] if arguments else []), first_sentence(rest)


def row(module: str, name: str, function: Any, is_method: bool) -> Function | None:
    """Build the row of one function.

    Returns None if its docstring is not good enough to learn.
    """
    doc = inspect.getdoc(function)
    if not doc:
        return None
    written, sentence = parse_doc(doc)
    signature = introspected(function, is_method) or written or "(...)"
    if "=<" in signature or " at 0x" in signature or not acceptable(sentence):
        return None
    return Function(module, name, signature, sentence)


def defined_in(module_name: str, function: Any) -> bool:
    """Return False for an object that a module without `__all__` merely imported.

    os.path is another module under that name, so its functions count as defined there.
    """
    home = getattr(function, "__module__", module_name) or module_name
    same_package = home.split(".")[0].lstrip("_") == module_name.split(".")[0]
    return same_package or module_name == "os.path" or inspect.isbuiltin(function)


def candidates() -> Iterator[tuple[str, str, Any, bool]]:
    """Yield everything that may become a row, in a fixed order.

    Each item is (module, name, object, is_method).
    """
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # termios and its like are not on every platform
            continue
        wanted = callable if module_name in CALLED_CLASSES else inspect.isroutine
        public = getattr(module, "__all__", None)
        for name in sorted(vars(module) if public is None else set(public)):
            function = getattr(module, name, None)
            if public is None and not defined_in(module_name, function):
                continue
            if wanted(function) and not (inspect.isclass(function) and issubclass(function, BaseException)):
                yield module_name, name, function, False
    for dotted in METHODS_OF:
        module_name, class_name = dotted.rsplit(".", 1)
        owner = getattr(importlib.import_module(module_name), class_name)
        for name in sorted(dir(owner)):
            method = getattr(owner, name)
            if inspect.isroutine(method):
                yield module_name, f"{class_name}.{name}", method, True


def collect() -> list[Function]:
    """Collect all rows, with each function object and each dotted name once."""
    rows: list[Function] = []
    seen: set[Any] = set()
    for module, name, function, is_method in candidates():
        if not all(NAME.match(part) for part in name.split(".")):
            continue
        identity = id(function) if not is_method else (module, name)
        found = row(module, name, function, is_method)
        if found is None or identity in seen or found.dotted in seen:
            continue
        seen.update((identity, found.dotted))
        rows.append(found)
    return rows


def load(path: Path = CORPUS) -> list[Function]:
    """Read the committed rows."""
    with path.open(encoding="utf-8") as lines:
        return [Function(**json.loads(line)) for line in lines]


def save(rows: Iterable[Function], path: Path = CORPUS) -> None:
    """Write one JSON object per line.

    A change of one function is then one changed line.
    """
    with path.open("w", encoding="utf-8") as out:
        for function in rows:
            out.write(json.dumps(asdict(function)) + "\n")


def main() -> None:
    """Collect the rows and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CORPUS)
    arguments = parser.parse_args()
    rows = collect()
    save(rows, arguments.out)
    print(f"{len(rows)} functions of {len({r.module for r in rows})} modules -> {arguments.out}")


if __name__ == "__main__":
    main()
