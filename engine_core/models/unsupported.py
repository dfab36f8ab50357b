"""The nature of checkpoints that no family supports, for error messages."""

import re
from collections.abc import Mapping
from typing import Any

_MULTIMODAL = re.compile(
    r"llava|vision|vl(for|chat|moe|_|$)|\dvfor|mmfor|omni|paligemma|idefics|mllama|pixtral|audio", re.IGNORECASE
)
_MULTIMODAL_FIELDS = ("vision_config", "audio_config", "vision_tower", "thinker_config")
_CLASSIFIER = re.compile(r"For(Sequence|Token)Classification$|RewardModel$")
_ENCODER = re.compile(r"Bert|(?<!LMHead)Model$|ForMaskedLM$|Encoder")


def describe(architecture: str, fields: Mapping[str, Any]) -> str:
    """Return the kind of an unsupported checkpoint, such as "multimodal".

    fields: its config.json. Empty if the reason is unknown.
    """
    text = fields.get("text_config")
    everywhere = {**(text if isinstance(text, dict) else {}), **fields}
    found = []
    if any(everywhere.get(name) for name in _MULTIMODAL_FIELDS) or _MULTIMODAL.search(architecture):
        found.append("multimodal")
    if everywhere.get("is_encoder_decoder"):
        found.append("an encoder and decoder")
    elif not found and _CLASSIFIER.search(architecture):
        found.append("a classifier or reward model, which generates no text")
    elif not found and _ENCODER.search(architecture):
        found.append("an encoder or embedding model, which generates no text")
    quantization = everywhere.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        found.append("quantized to MXFP4")
    return ", ".join(found)
