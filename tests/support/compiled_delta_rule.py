"""Run steps of a recurrent layer with its kernels as Triton's front end compiled them, without a GPU.

`python -m tests.support.compiled_delta_rule` prints, for each of `STEPS`, the largest difference of outputs, and of the
states and bases of its rows, from the oracle. Tests start this process: Triton's interpreter must be off.
"""

import json
import os
from unittest.mock import patch

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.measuring.offline_compiler import CompileOnlyDriver
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.kernels.reference.delta_rule import fold
from tests.support import ttir
from tests.support.delta_rule_case import STEPS, DeltaRuleCase


def main() -> None:
    assert "TRITON_INTERPRET" not in os.environ, "interpreted kernels cannot be compiled"
    driver.set_active(CompileOnlyDriver(90))
    with patch.object(JITFunction, "run", ttir.run), torch.inference_mode():
        cases = [DeltaRuleCase(kernels, [200] * 5) for kernels in (triton_kernels(False), torch_kernels())]
        for work, num_single in STEPS:
            found, expected = (case.step(work, num_single, padding=3) for case in cases)
            rows, positions = torch.tensor([(row, start + length) for row, start, length in work]).t()
            states = [fold(case.state, rows, positions)[0] for case in cases]
            bases = [case.state.base[rows] for case in cases]
            pairs = {"outputs": (found, expected), "states": states, "bases": bases}
            print(json.dumps({name: float((one - other).abs().max()) for name, (one, other) in pairs.items()}))


if __name__ == "__main__":
    main()
