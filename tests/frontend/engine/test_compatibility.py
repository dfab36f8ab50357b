"""Which engines a frontend can serve."""

import re

import pytest
from msgspec import structs

from tandem.frontend.engine.compatibility import Fingerprints, differ, mismatch
from tandem.protocol.events import Limits, ModelFacts, Ready
from tandem.protocol.version import PROTOCOL_VERSION


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
        (ready(version=99), rf"\b99, .*\b{PROTOCOL_VERSION};.*\bupgrade\b.*\bfrontend$"),
        (ready(version=1), rf"\b1, .*\b{PROTOCOL_VERSION};.*\bupgrade\b.*\bengine$"),
        (ready("x", "b"), r"tokenizer\.json \(sha256 x\).*\(a\)"),
        (ready("a", "y"), r"chat template\b.*\(sha256 y\).*\(b\)"),
    ],
)
def test_what_differs_is_named(theirs: Ready, reason: str) -> None:
    assert re.search(reason, mismatch(theirs, Fingerprints("a", "b")) or "")


def test_an_engine_whose_draft_model_was_loaded_for_other_weights_has_the_same_model() -> None:
    before = structs.replace(ready("a", "b").model, draft_model="small", draft_weight_version="0")
    assert not differ(before, structs.replace(before, draft_weight_version="1"))
    assert differ(before, structs.replace(before, draft_model="other"))
