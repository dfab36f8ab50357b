"""Read the prompt of a command from stdin."""

import sys


class NoPromptError(Exception):
    """Stdin has no usable prompt; the message says what to change."""


def read_prompt() -> str:
    """Read the prompt from stdin, without a byte order mark.

    Raises NoPromptError if stdin is closed, unreadable or blank.
    """
    try:
        text = "" if sys.stdin is None else sys.stdin.read().removeprefix("\ufeff")  # None if closed by the shell's <&-
    except UnicodeDecodeError as error:
        raise NoPromptError(
            f"the prompt on stdin is not {error.encoding}: {error.reason} at byte {error.start}"
        ) from None
    except OSError as error:
        raise NoPromptError(f"the prompt on stdin cannot be read: {error.strerror}") from None
    if not text.strip():
        raise NoPromptError("the prompt on stdin is empty, so nothing was sent; pipe a text to the command")
    return text
