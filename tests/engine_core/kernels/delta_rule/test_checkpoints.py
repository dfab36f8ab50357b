"""Rows that continue from checkpoints compute what the row does that they were saved from."""

import pytest
import torch

from tandem.engine_core.kernels.delta_rule.checkpoints import Checkpoints
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleState, base_length
from tandem.engine_core.kernels.kernel_set import KernelSet, torch_kernels, triton_kernels
from tests.support.delta_rule_case import SMALL, DeltaRuleCase

TOLERANCE = 2e-4


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return torch_kernels() if request.param == "oracle" else triton_kernels(False)


@pytest.mark.parametrize(
    ("kernels", "computed"),
    [*(("oracle", length) for length in (17, 32, 79, 80)), ("kernels", 79), ("kernels", 32)],
    indirect=["kernels"],
)
def test_a_row_continues_from_the_checkpoint_of_another(kernels: KernelSet, computed: int, device: str) -> None:
    """By a chunk, and by single tokens; the row held NaN before."""
    rest = 8
    case = DeltaRuleCase(kernels, [computed + rest, computed + rest], device=device, seed=computed)
    case.inputs[1] = case.inputs[0]
    saved = Checkpoints.allocate(SMALL, stacked(case.state), 3)
    expected = [case.step([(1, 0, computed)])]
    position = base_length(computed, case.state.ring)
    saved.save(1, 2, position)
    expected += [case.step([(1, start, 1)], 1) for start in range(computed, computed + rest)]
    known = torch.cat(expected)[position:]
    for chunk in (computed + rest - position, 5, 1):
        for tensor in case.tensors:
            tensor[2] = torch.nan
        saved.load(2, 2, position)
        starts = range(position, computed + rest, chunk)
        work = [(2, start, min(chunk, computed + rest - start)) for start in starts]
        found = torch.cat([case.step([own], int(chunk == 1)) for own in work])
        torch.testing.assert_close(found, known, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_checkpoint_stays_when_its_row_goes_on(device: str) -> None:
    case = DeltaRuleCase(torch_kernels(), [70], device=device)
    saved = Checkpoints.allocate(SMALL, stacked(case.state), 2)
    case.step([(1, 0, 40)])
    saved.save(1, 0, 32)
    before = saved.bases[:, 0].clone(), saved.inputs[:, 0].clone()
    torch.testing.assert_close(before[1][0], case.inputs[0][29:32, : SMALL.channels])
    case.step([(1, 40, 30)])
    saved.save(1, 1, 64)
    assert torch.equal(saved.bases[:, 0], before[0])
    assert torch.equal(saved.inputs[:, 0], before[1])
    assert not torch.equal(saved.bases[:, 1], before[0])


def stacked(state: DeltaRuleState) -> DeltaRuleState:
    """The state of a model with one layer."""
    return DeltaRuleState(*[tensor[None] for tensor in state.tensors])
