"""The kernels of recurrent layers equal their oracle as Triton's front end compiles them, in float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.delta_rule_case import STEPS

ROOT = Path(__file__).parents[4]


def test_compiled_kernels_equal_the_oracle() -> None:
    """The interpreter cannot show this: it runs the Python code of kernels, whose loops may be compiled to others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compiled_delta_rule"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(errors) == len(STEPS)
    assert [line for line in errors if not max(line.values()) < 2e-4] == []
