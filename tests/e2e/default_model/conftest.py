"""A server shared by the tests that leave it unchanged."""

import os
from collections.abc import Iterator

import openai
import pytest

from tests.support.serving import GUARD_SECONDS, Serving

WITHOUT_KERNELS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "flashinfer"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""
"""Module that Python imports at its start, after which no import finds the libraries of GPU kernels."""


# Not of the session: an idle server, with its heartbeats, takes CPU to the end of the suite. The folder is a package
# so that a fixture can have its scope.
@pytest.fixture(scope="package")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose processes have neither Triton nor FlashInfer, which a CPU does not need.

    It logs at debug as JSON, from which a test reads the engine's settings.
    """
    folder = tmp_path_factory.mktemp("serving")
    (folder / "sitecustomize.py").write_text(WITHOUT_KERNELS)
    places = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    logs = ("--log-level", "debug", "--log-format", "json")
    with Serving(folder / "log", *logs, environment={"PYTHONPATH": places}) as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=serving.url + "/v1", api_key="none", timeout=GUARD_SECONDS, max_retries=0) as client:
        yield client
