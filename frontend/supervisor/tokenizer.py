"""Convert tokenizers to tokenizer.json, once and in a child process."""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from tandem.frontend.hub.selection import TOKENIZER, TOKENIZER_SOURCES
from tandem.frontend.process import bare_environment, die_with_parent
from tandem.protocol.installing import install_packages

logger = logging.getLogger(__name__)

_EXTRA_FILES = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files that the conversion reads in addition to TOKENIZER_SOURCES."""
MAX_SECONDS = 300.0
"""Maximum seconds of a conversion; a busy machine takes a minute to import transformers."""
_PACKAGES = ("transformers", "sentencepiece", "protobuf", "tiktoken")
_MAX_REASON_CHARS = 300
MAX_SOURCE_BYTES = 2**28
"""Maximum bytes of the files that a tokenizer is converted from; those of large vocabularies have 20 MB."""
_PRIVATE = 0o700
_WRITABLE_BY_OTHERS = 0o002


class ConversionError(Exception):
    """A tokenizer cannot be converted; the message says what to do."""


def with_tokenizer(folder: Path, cache: Path) -> Path:
    """Return a folder of the same model that has a tokenizer.json.

    It is the model's own folder if that has a tokenizer.json, or nothing to convert. Otherwise it is a folder in the
    cache with the converted tokenizer and links to the model's files. Raises ConversionError if that fails.
    """
    if (folder / TOKENIZER).exists() or not any((folder / name).is_file() for name in TOKENIZER_SOURCES):
        return folder
    sources = [path for name in (*TOKENIZER_SOURCES, *_EXTRA_FILES) if (path := folder / name).is_file()]
    try:
        size = sum(path.stat().st_size for path in sources)
        if size > MAX_SOURCE_BYTES:
            reason = f"its files have {size} bytes, and at most {MAX_SOURCE_BYTES} are read"
            raise _refusal(folder, sources, reason)
        _make_private(cache)
        with _locked(cache):
            converted = _converted(folder, sources, cache)
            return _linked(folder, converted, cache)
    except OSError as error:
        raise ConversionError(
            f"{folder} has no {TOKENIZER}, and a converted one cannot be kept: {error.filename or cache}: "
            f"{error.strerror or error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None


def cache_folder() -> Path:
    """Return the user's folder for files that Tandem keeps between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _make_private(cache: Path) -> None:
    """Create the cache folder, which only this user may write.

    Raises ConversionError if another user could change the tokenizers in it.

    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(mode=_PRIVATE, exist_ok=True)
    facts = cache.stat()
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & _WRITABLE_BY_OTHERS:
        raise ConversionError(
            f"{cache}, where a converted tokenizer would be kept, can be changed by other users (owner {facts.st_uid}, "
            f"mode {facts.st_mode & 0o777:o}); set XDG_CACHE_HOME to a folder of your own"
        )


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Let one process at a time convert and link; others wait and use its result."""
    with ExitStack() as stack:
        with suppress(NotImplementedError, OSError):  # the file system has no locks or is read-only
            stack.enter_context(FileLock(cache / "tokenizers.lock"))
            for left in (cache / "tokenizers").glob("new-*"):  # left by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        yield


def _converted(folder: Path, sources: list[Path], cache: Path) -> Path:
    """Return the converted tokenizer, from the cache or by conversion.

    The cache key is the hash of the files and of the version of transformers.
    """
    if importlib.util.find_spec("transformers") is None:
        raise _refusal(
            folder, sources, f"its conversion needs packages that are not installed; run {install_packages(*_PACKAGES)}"
        )
    digest = hashlib.sha256(version("transformers").encode())
    for path in sources:
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    converted = cache / "tokenizers" / digest.hexdigest()
    if (converted / TOKENIZER).is_file():
        return converted / TOKENIZER
    converted.parent.mkdir(parents=True, exist_ok=True)
    logger.info("converting %s of %s to %s, once", sources[0].name, folder, TOKENIZER)
    with tempfile.TemporaryDirectory(dir=converted.parent, prefix="new-") as name:
        work = Path(name)
        (work / "in").mkdir()
        for path in sources:  # the child sees these files only, and no code
            shutil.copyfile(path, work / "in" / path.name)
        _run(folder, sources, work)
        (work / "done").mkdir()
        os.replace(work / "out" / TOKENIZER, work / "done" / TOKENIZER)
        with suppress(OSError):  # another process has created it
            os.rename(work / "done", converted)
    return converted / TOKENIZER


def _run(folder: Path, sources: list[Path], work: Path) -> None:
    """Convert in a child process. Raises ConversionError with its reason."""
    module = "tandem.frontend.supervisor.convert_tokenizer"
    command = [sys.executable, "-P", "-m", module, str(work / "in"), str(work / "out")]
    environment = bare_environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work), "TOKENIZERS_PARALLELISM": "false"}
    try:
        child = subprocess.run(
            die_with_parent(command), env=environment, capture_output=True, text=True, timeout=MAX_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _refusal(folder, sources, f"its conversion took more than {MAX_SECONDS:g} s") from None
    if child.returncode or not (work / "out" / TOKENIZER).is_file():
        last_line = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1][:_MAX_REASON_CHARS]
        reason = "".join(char if char.isprintable() else "?" for char in last_line)
        if child.returncode < 0:
            reason = "its conversion exceeded the limits on time or memory"
        hint = f". It may need packages; run {install_packages(*_PACKAGES)}" if _lacks_package(reason) else ""
        raise _refusal(folder, sources, reason.rstrip(".") + hint)


def _lacks_package(reason: str) -> bool:
    return any(word in reason for word in ("ImportError", "pip install", "tiktoken", "sentencepiece", "protobuf"))


def _refusal(folder: Path, sources: list[Path], reason: str) -> ConversionError:
    return ConversionError(
        f"{folder} has no {TOKENIZER}, and its {sources[0].name} was not converted: {reason}. Where transformers can "
        f"read it, this converts it: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _linked(folder: Path, tokenizer: Path, cache: Path) -> Path:
    """Create a folder with links to a model's files and its converted tokenizer."""
    whole = folder.resolve()
    key = hashlib.sha256(f"{whole}\0{tokenizer.parent.name}".encode()).hexdigest()
    linked = cache / "models" / key
    linked.mkdir(parents=True, exist_ok=True)
    targets = {path.name: path for path in whole.iterdir()} | {TOKENIZER: tokenizer}
    for link in linked.iterdir():
        if link.name not in targets:
            link.unlink(missing_ok=True)
    for name, target in targets.items():
        if not (linked / name).is_symlink() or (linked / name).readlink() != target:
            unnamed = linked / f".{name}.{os.getpid()}"
            unnamed.symlink_to(target)
            os.replace(unnamed, linked / name)
    return linked
