"""The `tandem` command with a fake engine core, in a folder of the test's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tandem_process import Start, TandemFolder


@pytest.fixture
def tandem(tmp_path: Path) -> Iterator[Start]:
    """Start `tandem` in a folder with this program as its engine core."""
    folder = TandemFolder(tmp_path)
    yield folder.start
    folder.close()
