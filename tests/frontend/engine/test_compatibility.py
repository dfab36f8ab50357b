"""Which engines a frontend can serve."""

import pytest

from tandem.frontend.engine.compatibility import Fingerprints, mismatch
from tandem.protocol.events import Limits, ModelFacts, Ready
from tandem.protocol.version import PROTOCOL_VERSION

SPEAKS = f"the engine speaks protocol {{}}, this frontend {PROTOCOL_VERSION}; "


def ready(tokenizer: str = "", template: str = "", version: int = PROTOCOL_VERSION) -> Ready:
    facts = ModelFacts("m", 100, 64, [1], tokenizer, "cpu", "float32", 0, template)
    return Ready(version, 7, facts, Limits(1, 64, 16, 64, 8))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ready(), Fingerprints()),
        (ready("a", "b"), Fingerprints("a", "b")),
        (ready("a", "b"), Fingerprints()),
        (ready(), Fingerprints("a", "b")),
        (ready("a", ""), Fingerprints("a", "b")),
    ],
)
def test_an_empty_fingerprint_fits_any(theirs: Ready, ours: Fingerprints) -> None:
    assert mismatch(theirs, ours) is None


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (
            ready(version=99),
            f"{SPEAKS.format(99)}upgrade tandem-llm on the host of the frontend",
        ),
        (
            ready(version=1),
            f"{SPEAKS.format(1)}upgrade tandem-llm on the host of the engine",
        ),
        (ready("x", "b"), "the engine's tokenizer.json (sha256 x) is not this frontend's (a)"),
        (
            ready("a", "y"),
            "the chat template of the engine's model (sha256 y) is not that of this frontend's folder (b)",
        ),
    ],
)
def test_what_differs_is_named(theirs: Ready, reason: str) -> None:
    assert reason in (mismatch(theirs, Fingerprints("a", "b")) or "")
