import pytest

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.startup.engine import DEFAULT_MODEL

VOCAB, ENDS = 4200, (2, 5)


@pytest.fixture(scope="session")
def grammars() -> Grammars:
    """Grammars over the default model's tokenizer, for a model with a larger vocabulary and two end ids."""
    return Grammars(DEFAULT_MODEL / "tokenizer.json", VOCAB, ENDS)
