"""The files of the playground and of the reference, and their headers."""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import frontend
from tandem.frontend.api.page import page_paths
from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, head

FOLDER = Path(frontend.__path__[0]) / "page"
VENDOR = FOLDER / "vendor"
OWN = sorted(file for file in FOLDER.iterdir() if file.is_file())
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
}


def test_page_files_have_their_type_and_a_strict_policy(server: RunningServer) -> None:
    paths = page_paths()
    served = {file for file in FOLDER.rglob("*") if file.suffix in TYPES}
    assert {file.resolve() for file in paths.values()} == {file.resolve() for file in served}
    assert set(OWN) <= served
    assert {"/", "/docs", "/favicon.ico"} <= paths.keys()
    for path, file in paths.items():
        response = get(server.url + path)
        assert response.status_code == 200
        assert response.content == file.read_bytes()
        assert response.headers["content-type"].partition(";")[0] == TYPES[file.suffix]
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in policy
        assert head(server.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/page", "/page/", "/page/none.js", "/page/../routes/page.py", "/page/%2e%2e/app.py"])
def test_page_serves_no_other_file(path: str, server: RunningServer) -> None:
    assert get(server.url + path).status_code == 404


def test_page_needs_no_key_but_its_requests_do(engine: FakeEngine, config: FrontendConfig) -> None:
    engine.start()
    running = RunningServer(msgspec.structs.replace(config, api_keys=("secret",))).start().ready()
    try:
        assert {get(running.url + path).status_code for path in page_paths()} == {200}
        assert get(running.url + "/page/none.js").status_code == 401
        assert get(running.url + "/v1/models").status_code == 401
    finally:
        running.stop()


class Reader(HTMLParser):
    """Collect everything that a strict policy would block, and every id."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.ids: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.inline += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in names) else []
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]


def test_page_has_no_inline_or_external_resources() -> None:
    for document in FOLDER.glob("*.html"):
        reader = Reader()
        reader.feed(document.read_text())
        assert reader.inline == []
        assert len(reader.ids) == len(set(reader.ids))
        assert {"/" + source.removeprefix(".") for source in reader.sources} <= {*page_paths(), "/openapi.json"}
    for file in [one for one in OWN if one.suffix != ".ico"]:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), file
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert sink not in text, f"{file} uses {sink}"
        assert "localStorage" not in text or file.name == "storage.js", file


def test_libraries_of_others_are_named_unchanged_and_licensed() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| `[\w-]+` \| [\d.]+ \| [\w.-]+ \(`(\w+)`\) \| `[\w./-]+/([\w.-]+)` \| `(\w{64})` \|$",
        (VENDOR / "README.md").read_text(),
        re.MULTILINE,
    )
    assert [folder for folder, *_ in rows] == sorted(path.name for path in VENDOR.iterdir() if path.is_dir())
    for folder, licence, name, digest in rows:
        assert sorted(path.name for path in (VENDOR / folder).iterdir()) == sorted([licence, name])
        assert hashlib.sha256((VENDOR / folder / name).read_bytes()).hexdigest() == digest
        assert "Permission is hereby granted" in (VENDOR / folder / licence).read_text()
