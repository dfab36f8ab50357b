"""The version of the distribution."""

import pytest

from tandem.protocol import version
from tandem.protocol.version import distribution_version


def test_distribution_version_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every response names the version, and a lookup costs as much as the rest of a short request."""
    found = distribution_version()

    def again(_: str) -> str:
        raise AssertionError("looked up again")

    monkeypatch.setattr(version, "version", again)
    assert distribution_version() == found != ""
