"""`tandem` whose engine core is `tests.support.faulty_engine`: `python -m tests.support.faulty_serve serve ...`."""

import sys
from collections.abc import Sequence

from tandem.frontend.cli.main import main
from tandem.frontend.supervisor import launch
from tandem.protocol.engine_options import EngineOptions

ENGINE = "tests.support.faulty_engine"
engine_command = launch.engine_command


def faulty_command(endpoint: str, options: EngineOptions, transport_flags: Sequence[str] = ()) -> list[str]:
    command = engine_command(endpoint, options, transport_flags)
    return [ENGINE if part == "tandem.engine_core" else part for part in command]


if __name__ == "__main__":
    launch.engine_command = faulty_command
    sys.exit(main())
