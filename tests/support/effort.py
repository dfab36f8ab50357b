"""Effort of the random tests of pages and scheduling; TANDEM_TEST_EFFORT=20 makes them twenty times as long.

Above 1, all tests have other random numbers in each run (`tests/conftest.py`).
"""

import os

from hypothesis import settings

EFFORT = int(os.environ.get("TANDEM_TEST_EFFORT", "1"))


def machine(examples: int, steps: int) -> settings:
    """Make the settings of a state machine test."""
    return settings(deadline=None, max_examples=examples * EFFORT, stateful_step_count=steps, print_blob=True)
