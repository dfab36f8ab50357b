"""Entry point of the console command `tandem`.

Importing the command takes a third of a second. An interrupt in that time exits like a later one, without a traceback.
"""

from tandem.frontend.cli.ending import INTERRUPTED


def main() -> int:
    """Run the command of the process's arguments and return its exit code."""
    try:
        from tandem.frontend.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
