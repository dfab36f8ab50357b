"""Entry of the console command `tandem`.

The modules of the command take a third of a second to load. An interrupt in that time ends it as one later does,
without a traceback.
"""

from tandem.frontend.cli.ending import INTERRUPTED


def main() -> int:
    """Run the command of the process's arguments and return its exit code."""
    try:
        from tandem.frontend.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
