"""The shell blocks of the pages of deploy/, run in a folder that stands for a host."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = sorted([*DEPLOY.glob("*.md"), *DEPLOY.glob("*/*.md")])
PLACES = re.compile(r"(?<![\w./-])/(?=(?:etc|opt|usr/lib)/)")
"""Slash that begins a path of the host which a command writes or reads."""
NOT_HERE = (*("apt-get", "curl", "nginx", "pip", "pkill", "python3", "scp", "serve", "systemctl", "systemd-sysusers"),)
"""Programs that need root, another machine or a running server; here they do nothing."""
TANDEM = """#!/bin/sh
case $1 in
    keys | api-key) exec {python} -c 'import sys; from tandem.frontend.cli.main import main; sys.exit(main())' "$@" ;;
    *) echo "tandem $*" ;;
esac
"""
DOCKER = """#!{python}
import os, sys
_, command, *words = sys.argv
if command == "run":
    options = []
    while words[0].startswith("-"):
        options.append((words[0], words.pop(1) if words[0] in ("-u", "-v") else ""))
        words.pop(0)
    image, *words = words
    assert image == "tandem-frontend:{version}", image
    for source, target in [value.split(":") for option, value in options if option == "-v"]:
        words = [word.replace(target, source, 1) if word.startswith(target + "/") else word for word in words]
    os.execvp("tandem", ["tandem", *words])
"""
"""`docker run` does what the entry point of the image of frontends does, with the host's folders in place of mounts."""
KUBECTL = """#!/bin/sh
if [ "$1" = kustomize ]; then exec {kubectl} "$@"; fi
"""


def blocks() -> list[str]:
    """Return the shell blocks, without the comments at the ends of lines."""
    texts = [page.read_text() for page in PAGES]
    found = [block for text in texts for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    return [re.sub(r" {2,}#.*$", "", block, flags=re.MULTILINE) for block in found]


class Host:
    """A folder with what a clone of the repository has for operators, and programs that touch nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shims = folder / "shims"
        shims.mkdir()
        shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("secrets", "__pycache__"))
        shutil.copytree(
            ROOT / "deploy" / "kubernetes" / "secrets", folder / "deploy" / "kubernetes" / "secrets",
            ignore=shutil.ignore_patterns("keys", "api-keys.toml"),
        )  # fmt: skip
        programs = dict.fromkeys(NOT_HERE, "#!/bin/sh\n")
        programs["tandem"] = TANDEM.format(python=sys.executable)
        programs["docker"] = DOCKER.format(python=sys.executable, version=version("tandem-llm"))
        programs["kubectl"] = KUBECTL.format(kubectl=shutil.which("kubectl") or ":")
        for name, text in programs.items():
            (shims / name).write_text(text)
            (shims / name).chmod(0o755)
        for place in ("etc/nginx/conf.d", "etc/nginx/sites-enabled", "etc/systemd/system", "usr/lib", "opt/tandem/bin"):
            (folder / place).mkdir(parents=True)
        for name in ("tandem", "pip"):
            shutil.copy(shims / "tandem" if name == "tandem" else shims / "curl", folder / "opt/tandem/bin" / name)
        (folder / "etc/nginx/sites-enabled/default").touch()
        for name in ("cert.pem", "key.pem"):
            (folder / name).touch()

    def run(self, block: str) -> str:
        """Run a block; return what it printed. A line that fails fails all."""
        path = f"{self.folder}/shims:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "HF_TOKEN": "secret"}
        done = subprocess.run(
            ["sh", "-euc", PLACES.sub(f"{self.folder}/", block)],
            cwd=self.folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout
