import pytest

from engine_core.build import DEFAULT_MODEL
from engine_core.constraints.grammars import Grammars

VOCAB, ENDS = 4200, (2, 5)


@pytest.fixture(scope="session")
def grammars() -> Grammars:
    """Of the default model's tokenizer, for a model with a larger vocabulary and two end ids."""
    return Grammars(DEFAULT_MODEL / "tokenizer.json", VOCAB, ENDS)
