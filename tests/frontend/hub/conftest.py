"""Clients of the fake hub, which speaks plain HTTP: they need no certificates, which take longest to load."""

import ssl

import pytest


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_arguments, **_options: None)
