"""Command line of the frontends that benchmarks measure."""

import pytest

from benchmarks.frontends.deployment import MODEL, frontend_command
from tandem.frontend.cli.main import build_parser


@pytest.mark.parametrize("frontends", [1, 4])
def test_number_of_frontends_does_not_depend_on_the_machine(frontends: int) -> None:
    command = frontend_command(frontends, "ipc:///engine", MODEL, 8000)
    arguments = build_parser().parse_args(command[command.index("frontend") :])
    assert (arguments.frontends, arguments.port) == (frontends, 8000)
