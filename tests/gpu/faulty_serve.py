"""`tandem` whose engine core is `tests.gpu.faulty_engine`: `python -m tests.gpu.faulty_serve serve ...`."""

import argparse
import sys

from frontend import launch
from frontend.cli import main

ENGINE = "tests.gpu.faulty_engine"
engine_command = launch.engine_command


def faulty_command(arguments: argparse.Namespace, endpoint: str) -> list[str]:
    return [ENGINE if part == "engine_core" else part for part in engine_command(arguments, endpoint)]


if __name__ == "__main__":
    launch.engine_command = faulty_command
    sys.exit(main())
