"""A server shared by the tests that leave it unchanged."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.serving import GUARD_SECONDS, Serving


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("serving") / "log") as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=serving.url + "/v1", api_key="none", timeout=GUARD_SECONDS, max_retries=0) as client:
        yield client
