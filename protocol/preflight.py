"""Report of an engine's preflight check.

`tandem doctor` and `--check` read it from a child process, as JSON.
"""

from msgspec import Struct

Section = dict[str, str]
"""Names and texts, in display order."""


class PreflightReport(Struct, frozen=True):
    """Facts of the machine and the model, and the engine's settings for them."""

    gpus: list[str] = []
    """One line for each GPU that the engine would use."""
    model: Section = {}
    choices: Section = {}
    problems: list[str] = []
    """Reasons why the engine would not start, whatever else runs here; empty if it would."""
    shortage: str = ""
    """The reason why it would not start now, but would with the memory that others use; empty if there is none."""
