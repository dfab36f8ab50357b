"""The arguments of the application."""

import pytest
from pydantic import ValidationError
from tandem_ray.settings import Settings


def test_the_command_has_the_socket_and_the_times_of_the_replica() -> None:
    settings = Settings(gpus=1, model="Qwen/Qwen3-4B", flags="--frontends 2 --api-keys '/etc/my keys'")
    assert settings.command(["tandem"], "/run/x/http") == [
        *("tandem", "serve", "Qwen/Qwen3-4B", "--uds", "/run/x/http", "--ops-port", "0", "--shutdown-delay", "5"),
        *("--frontends", "2", "--api-keys", "/etc/my keys"),
    ]


def test_the_default_model_needs_no_name() -> None:
    assert Settings(gpus=0).command(["tandem"], "s")[:3] == ["tandem", "serve", "--uds"]


@pytest.mark.parametrize("flags", ["--port 8000", "--uds=/x", "--frontends 2 --ops-port 8100"])
def test_flags_that_the_replica_chooses_are_refused_by_name(flags: str) -> None:
    with pytest.raises(ValidationError, match=r"^[\s\S]*\bflags\b.*--(port|uds|ops-port)\b"):
        Settings(gpus=0, flags=flags)


def test_the_number_of_gpus_must_be_given() -> None:
    with pytest.raises(ValidationError, match="gpus"):
        Settings()  # type: ignore[call-arg]
