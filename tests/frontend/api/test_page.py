"""The files of the playground page and their headers."""

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
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def test_page_files_have_their_type_and_a_strict_policy(server: RunningServer) -> None:
    paths = page_paths()
    assert sorted(file.name for file in paths.values()) == sorted(file.name for file in FOLDER.iterdir())
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
        self.labelled = 0
        self.sources: list[str] = []
        self._within: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.inline += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in names) else []
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]


def test_page_has_no_inline_or_external_resources() -> None:
    reader = Reader()
    reader.feed((FOLDER / "index.html").read_text())
    assert reader.inline == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {"/" + source for source in reader.sources} <= page_paths().keys()
    for file in FOLDER.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), file
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
            assert sink not in text, f"{file} uses {sink}"
