"""Terminal of a chat: line editing, a history, and input that waits."""

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

MAX_HISTORY = 1000
"""Lines that the history keeps."""


def history_path() -> Path:
    """Return the file of the history, in the user's directory of states."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".local" / "state"
    return base / "tandem" / "chat_history"


class LineHistory:
    """Lines typed in this run and in earlier ones, for the keys that recall them.

    `path` is the file that keeps them, readable by its owner alone; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> None:
        """Turn line editing on and recall the lines of earlier runs.

        A file that cannot be used is reported on stderr once, and left alone.
        """
        try:
            import readline
        except ImportError:  # Python was built without it
            self._path = None
            return
        readline.set_auto_history(True)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._path.chmod(0o600)
            readline.set_history_length(MAX_HISTORY)
            readline.read_history_file(self._path)
            if readline.get_current_history_length() > MAX_HISTORY:
                readline.write_history_file(self._path)
        except OSError as error:
            print(f"tandem: no history: {self._path} cannot be used ({error.strerror})", file=sys.stderr)
            self._path = None

    def keep(self) -> None:
        """Write the line that was just typed to the file."""
        if self._path is None:
            return
        import readline

        with contextlib.suppress(OSError):
            readline.append_history_file(1, self._path)


@contextlib.contextmanager
def hold_input(terminal: TextIO) -> Iterator[None]:
    """Keep what is typed out of the output, for the next prompt to read.

    The terminal echoes nothing meanwhile; interrupts work as ever. Does nothing if `terminal` is not one.
    """
    if not terminal.isatty():
        yield
        return
    descriptor = terminal.fileno()
    before = termios.tcgetattr(descriptor)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        # Not TCSAFLUSH, which drops what was typed.
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
