"""`tandem` whose engine core is `tests.support.faulty_engine`: `python -m tests.support.faulty_serve serve ...`."""

import argparse
import sys

from tandem.frontend.cli.main import main
from tandem.frontend.supervisor import launch

ENGINE = "tests.support.faulty_engine"
engine_command = launch.engine_command


def faulty_command(arguments: argparse.Namespace, endpoint: str) -> list[str]:
    return [ENGINE if part == "tandem.engine_core" else part for part in engine_command(arguments, endpoint)]


if __name__ == "__main__":
    launch.engine_command = faulty_command
    sys.exit(main())
