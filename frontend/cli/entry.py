"""Entry of the console command `tandem`.

Its modules take a third of a second to load. An interrupt in that time ends it as one later does, without a traceback.
"""

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def main() -> int:
    """Run the command of the process's arguments and return its exit code."""
    try:
        from tandem.frontend.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
