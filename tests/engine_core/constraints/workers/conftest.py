"""Memory for masks, of which workers map the arrays."""

import pytest

from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.integers import ceil_div
from tests.engine_core.constraints.conftest import VOCAB


@pytest.fixture
def memory() -> MaskMemory:
    memory = MaskMemory()
    memory.allocate(2, ceil_div(VOCAB, 32))
    return memory
