"""The commands of the pages of deploy/ run, and every flag in deploy/ exists."""

import re
from pathlib import Path

import pytest

from tandem.frontend.access.key_file import load_key_file
from tandem.frontend.cli.main import build_parser
from tandem.protocol.curve import load_curve
from tests.support.deploy_readme import NOT_HERE, PAGES, Host, blocks
from tests.support.flag_tables import commands

DEPLOY = Path(__file__).parents[2] / "deploy"
OTHER_FLAGS = {
    *("--build", "--rm", "--index-url", "--cert", "--from-literal", "--key", "--scale", "--stop-timeout", "--ulimit"),
    *("--now", "--working-dir", "--target", "--from", "--interval", "--timeout", "--start-period", "--retries"),
    *("--no-cache-dir", "--no-install-recommends"),
    *("--uid", "--user-group", "--home-dir", "--no-create-home", "--shell"),
}  # fmt: skip
"""Flags of docker, kubectl, systemctl, Ray, pip, apt-get and useradd."""
TEXTS = sorted(
    path
    for path in DEPLOY.rglob("*")
    if path.is_file()
    and path.suffix not in (".json", ".py", ".pyc")
    and (path.suffix == ".md" or "ray" not in path.parts)
)
KNOWN_PROGRAMS = {
    *NOT_HERE,
    "cd",
    "tandem",
    "docker",
    "kubectl",
    "mkdir",
    "chmod",
    "touch",
    "openssl",
    "install",
    "rm",
    "cp",
}


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(DEPLOY)) for path in TEXTS])
def test_every_flag_exists(path: Path) -> None:
    known = {flag for parser in commands().values() for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text()))
    assert named <= known | OTHER_FLAGS


def test_commands_that_start_a_server_for_others_name_their_ops_port() -> None:
    """One that a person tries may take the next free port; one that is scraped and probed may not."""
    found = 0
    for path in TEXTS:
        if path.suffix in (".yml", ".yaml", ".service") or path.name == "Dockerfile":
            text = path.read_text()
            commands_of_servers = re.findall(
                r'CMD \["(?:serve|frontend)"|- (?:engine|frontend)\n|^ExecStart=\S*/tandem ', text, re.MULTILINE
            )
            found += len(commands_of_servers)
            assert len(re.findall(r"--ops-port", text)) >= len(commands_of_servers), path
    assert found == 2 + 3 + 2 + 2


def test_the_index_stays_short_and_names_every_page() -> None:
    index = (DEPLOY / "README.md").read_text()
    assert len(index.splitlines()) < 100
    linked = {DEPLOY / target for target in re.findall(r"\]\(([^)#:]+)\)", index)}
    assert linked == set(PAGES) - {DEPLOY / "README.md"}


def test_blocks_run_on_a_host(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for block in blocks():
        for line in filter(None, map(str.strip, block.splitlines())):
            assert line.split()[0].rpartition("/")[2] in KNOWN_PROGRAMS, line
        for printed in host.run(block).splitlines():
            if printed.startswith("tandem "):
                build_parser().parse_args(printed.split()[1:])
    assert (tmp_path / "etc/nginx/tandem/locations.conf").read_text() == (DEPLOY / "nginx/locations.conf").read_text()
    assert (tmp_path / "etc/systemd/system/tandem.service").exists()
    for folder in ("secrets", "kubernetes/secrets"):
        (key,) = load_key_file(tmp_path / "deploy" / folder / "api-keys.toml")
        assert key.name == "alice"
    keys = tmp_path / "deploy/kubernetes/secrets/keys"
    assert load_curve(keys / "frontends/frontend").public == load_curve(keys).public
