"""The stages of a Dockerfile, built and run in a plain folder by an unprivileged user."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
NOBODY = 65534
PLACES = re.compile(r"(?<![\w.-])/(?=(?:src|opt|var/lib|run|models)\b)")
"""Slash that begins a path of the image which a build or a command writes or reads."""
ROOT_ONLY = ("apt-get", "useradd", "chown")
"""Commands that only root may run; here they do nothing."""
SECONDS = 900.0
READ_ONLY = """
for place in / {root}; do mount --bind $place $place; mount -o remount,bind,ro $place; done
for place in {writable}; do mount --bind $place $place; mount -o remount,bind,rw $place; done
cd {home}
exec setpriv --reuid {user} --regid {user} --clear-groups "$@"
"""
"""Script of a mount namespace in which only some folders can be written."""


class Stage(Struct):
    """One stage: its base (an image or another stage), its name and its instructions."""

    base: str
    name: str
    instructions: list[tuple[str, str]]

    def last(self, word: str) -> str:
        return [text for name, text in self.instructions if name == word][-1]

    def argv(self, word: str) -> list[str]:
        """Return the arguments of an instruction in JSON form."""
        argv: list[str] = json.loads(re.sub(r"^[^\[]*", "", self.last(word)))
        return argv


def stages() -> dict[str, Stage]:
    """Parse the Dockerfile into its stages by name."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = Stage(base, name, [])
        else:
            found[list(found)[-1]].instructions.append((word, rest.strip()))
    return found


def lineage(name: str) -> Iterator[Stage]:
    """Yield what a stage is built of, in the order of the build."""
    known = stages()
    for word, text in known[name].instructions:
        if word == "COPY" and (source := re.match(r"--from=(\S+)", text)):
            yield from lineage(source[1])
    if known[name].base in known:
        yield from lineage(known[name].base)
    yield known[name]


class PlainImage:
    """A target of the Dockerfile in a folder, which stands for the root of the image's file system."""

    def __init__(self, root: Path, target: str) -> None:
        self.root = root
        self.target = target
        self.environment = {"PATH": f"{root}/shims:/usr/bin:/bin", "HOME": str(root), "TMPDIR": f"{root}/tmp"}
        self.user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}

    def build(self, **environment: str) -> None:
        """Run what the target is built of; `environment` is added to that of the commands."""
        (self.root / "shims").mkdir()
        (self.root / "tmp").mkdir()
        for name in ROOT_ONLY:
            (self.root / "shims" / name).write_text("#!/bin/sh\nexit 0\n")
            (self.root / "shims" / name).chmod(0o755)
        if os.getuid() == 0:
            os.chown(self.root, NOBODY, NOBODY)
            os.chown(self.root / "tmp", NOBODY, NOBODY)
        (self.root / "shims" / "python3").symlink_to(self._python())
        for stage in lineage(self.target):
            folder = self.root
            for word, text in stage.instructions:
                if word == "WORKDIR":
                    folder = Path(self.there(text))
                    self.run(["mkdir", "-p", str(folder)])
                elif word == "COPY" and text == ". .":
                    self._copy_context(folder)
                elif word == "COPY":
                    _, source, target = text.split()
                    assert source == target, "stages share one folder here"
                    assert Path(self.there(source)).exists(), text
                elif word == "RUN":
                    self.run(["sh", "-ec", self.there(text)], folder, **environment)
                elif word == "ENV":
                    for pair in text.split():
                        name, _, value = pair.partition("=")
                        value = self.there(value).replace("$PATH", self.environment["PATH"])
                        self.environment[name] = value

    def there(self, text: str) -> str:
        """Return a text whose paths of the image are in the folder."""
        return PLACES.sub(f"{self.root}/", text)

    def command(self, changes: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Return ENTRYPOINT and CMD, with changes of single arguments."""
        stage = stages()[self.target]
        given = dict(changes)
        return [given.get(word, self.there(word)) for word in (*stage.argv("ENTRYPOINT"), *stage.argv("CMD"))]

    def run(self, argv: Sequence[str], folder: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            argv, cwd=folder or self.root, env={**self.environment, **environment}, capture_output=True, text=True,
            timeout=SECONDS, check=False, umask=0o022, **self.user,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, argv: Sequence[str], log: Path, *volumes: str) -> "subprocess.Popen[bytes]":
        """Start a server, on a read-only file system if the tests' user may make one.

        volumes: folders that it may write besides those of the image.
        """
        home, user = self.there("/var/lib/tandem"), self.user
        if (
            os.getuid() == 0
            and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
        ):
            writable = " ".join((home, self.there("/run/tandem"), self.environment["TMPDIR"], *volumes))
            script = READ_ONLY.format(root=self.root, writable=writable, home=home, user=NOBODY)
            argv, user = ["unshare", "-m", "sh", "-euc", script, "sh", *argv], {}
        with log.open("wb") as output:
            return subprocess.Popen(
                argv, cwd=home, env=self.environment, stdout=output, stderr=subprocess.STDOUT, umask=0o022, **user
            )

    def is_healthy(self, port: int) -> bool:
        """Run HEALTHCHECK with another ops port."""
        argv = [word.replace("8100", str(port)) for word in stages()[self.target].argv("HEALTHCHECK")]
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, timeout=SECONDS, check=False, **self.user
        )
        return done.returncode == 0

    def _python(self) -> str:
        """Return an interpreter that the user may run and that makes environments."""
        for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
            test = "import ensurepip, sys, venv; assert sys.version_info >= (3, 11)"
            try:
                subprocess.run([path, "-c", test], check=True, capture_output=True, timeout=SECONDS, **self.user)
            except (OSError, subprocess.CalledProcessError):
                continue
            return path
        raise AssertionError("another user can run no Python here")

    def _copy_context(self, folder: Path) -> None:
        """Copy what .dockerignore leaves of the tree."""
        lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
        ignored = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
        for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)
        if os.getuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
