"""Check that an engine's model and protocol match this frontend's."""

from msgspec import Struct, structs

from tandem.protocol.events import ModelFacts, Ready
from tandem.protocol.version import PROTOCOL_VERSION, protocol_remedy


class Fingerprints(Struct, frozen=True):
    """Fingerprints of the files that determine the token ids of a prompt.

    Each is a SHA-256 in hex, or "" if not compared.
    """

    tokenizer: str = ""
    template: str = ""
    """Fingerprint of the checkpoint's own chat templates; "" if it has none, or --chat-template replaces them."""


def mismatch(ready: Ready, ours: Fingerprints) -> str | None:
    """Return why this frontend cannot serve an engine, or None.

    An empty fingerprint on either side matches any.
    """
    if ready.protocol_version != PROTOCOL_VERSION:
        remedy = protocol_remedy(PROTOCOL_VERSION, ready.protocol_version)
        return f"the engine speaks protocol {ready.protocol_version}, this frontend {PROTOCOL_VERSION}; {remedy}"
    theirs = ready.model
    if _conflict(theirs.tokenizer_fingerprint, ours.tokenizer):
        return (
            f"the engine's tokenizer.json (sha256 {theirs.tokenizer_fingerprint[:12]}) is not this frontend's "
            f"({ours.tokenizer[:12]}); give both the same model directory"
        )
    if _conflict(theirs.template_fingerprint, ours.template):
        return (
            f"the chat template of the engine's model (sha256 {theirs.template_fingerprint[:12]}) is not that of this "
            f"frontend's folder ({ours.template[:12]}); give both the same model directory, or choose a template for "
            "this frontend with --chat-template FILE"
        )
    return None


def differ(before: ModelFacts, now: ModelFacts) -> bool:
    """Return True if a request for one engine's model may be invalid for the next one's."""
    older, newer = (structs.replace(facts, created=0, draft_weight_version="") for facts in (before, now))
    return older != newer


def _conflict(theirs: str, ours: str) -> bool:
    return bool(theirs and ours and theirs != ours)
