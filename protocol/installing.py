"""Commands that install packages which an optional part needs.

The distribution is on no package index, so a command names the packages of an extra themselves, from the metadata of
the installation. It works from a clone and from a wheel alike.
"""

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

_DISTRIBUTION = "tandem-llm"
_OF_EXTRA = re.compile(r"""(?P<requirement>.*?);\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']\s*""")
_OWN_EXTRAS = re.compile(rf"{_DISTRIBUTION}\[(?P<extras>[\w,\s-]+)\]\s*")


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml.

    In a source tree that was never installed, this is the README's command.
    """
    try:
        listed = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return f"{_installer()} -e {shlex.quote(f'.[{extra}]')}"
    return install_packages(*dict.fromkeys(_requirements(listed, extra)))


def install_packages(*requirements: str) -> str:
    """Return the command that installs some requirements into the environment of this process."""
    return f"{_installer()} {shlex.join(requirements)}"


def _installer() -> str:
    """Return the command without the packages to install; an environment that uv made has no pip."""
    python = shlex.quote(sys.executable or "python3")
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is not None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def _requirements(listed: list[str], extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of the extras that it names."""
    for line in listed:
        found = _OF_EXTRA.fullmatch(line)
        if found is None or found["extra"] != extra:
            continue
        own = _OWN_EXTRAS.fullmatch(found["requirement"])
        if own is None:
            yield found["requirement"].strip()
            continue
        for name in own["extras"].split(","):
            yield from _requirements(listed, name.strip())
