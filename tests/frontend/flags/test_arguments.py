"""The table of HTTP flags, and the settings that it fills."""

from pathlib import Path

import pytest
from msgspec import Struct

from tandem.frontend.cli.main import build_parser
from tandem.frontend.config import ChatOptions, FrontendConfig
from tandem.frontend.flags.arguments import check_traces, frontend_config, http_argv
from tandem.frontend.flags.flag import Flag, out_of_bounds
from tandem.frontend.flags.http_flags import FRONTEND_FLAGS
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.engine_options import flag_name

ARGV = ["frontend", "--model-dir", "m", "--endpoint", "ipc:///x"]
OTHERWISE_FILLED = {
    "endpoint",
    "model_dir",
    "transport",
    "listener_fds",
    "slot",
    "supervisor_fd",
    "limits",
    "chat",
    "connections",
    "api_keys",
    "store_limits",
}
BOUNDED = [flag for flag in FRONTEND_FLAGS if flag.bounds is not None]


@pytest.mark.parametrize("struct", [FrontendConfig, ChatOptions, RequestLimits, StoreLimits])
def test_every_setting_is_filled_by_one_flag(struct: type[Struct]) -> None:
    filled = [flag.field_name for flag in FRONTEND_FLAGS if flag.struct is struct]
    assert sorted(filled) == sorted(set(struct.__struct_fields__) - OTHERWISE_FILLED)


def test_default_arguments_give_the_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    assert frontend_config(build_parser().parse_args(ARGV)) == FrontendConfig("ipc:///x", Path("m"))


@pytest.mark.parametrize("flag", BOUNDED, ids=lambda flag: flag.name)
def test_number_outside_the_bounds_of_its_flag_is_rejected(flag: Flag) -> None:
    assert flag.bounds is not None
    low, high = flag.bounds
    for value in (low - 1, high + 1):
        arguments = build_parser().parse_args([*ARGV, f"{flag_name(flag.name)}={flag.parse(str(int(value)))}"])
        (problem,) = out_of_bounds(arguments, FRONTEND_FLAGS)
        assert problem.startswith(f"{flag_name(flag.name)} must")


def test_forwarded_flags_give_the_same_settings_except_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    changed = ["--port", "1", "--max-body", "3", "--cors-origin", "*", "--tool-parser", "json", "--log-level", "error"]
    changed.append("--no-special-tokens-in-text")
    arguments = build_parser().parse_args([*ARGV, *changed])
    forwarded = build_parser().parse_args([*ARGV, *http_argv(arguments)])
    assert forwarded.port is None
    assert frontend_config(forwarded) == frontend_config(arguments)


@pytest.mark.parametrize(
    ("url", "installed", "reason"),
    [
        ("", False, ""),
        ("http://localhost:4318", True, ""),
        ("https://host/v1/traces", True, ""),
        ("localhost:4317", True, "OTLP/HTTP"),
        ("http://localhost:4318", False, "opentelemetry-sdk"),
    ],
)
def test_traces_need_a_url_and_their_packages(
    monkeypatch: pytest.MonkeyPatch, url: str, installed: bool, reason: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if installed else None)
    if reason:
        with pytest.raises(ValueError, match=reason):
            check_traces(url)
    else:
        check_traces(url)
