"""The text halves of multimodal checkpoints.

They have families of their own, and other names of tensors.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextBackbone:
    """Text backbone of a multimodal architecture."""

    architecture: str
    """Architecture of the text backbone alone."""
    model_type: str
    """`model_type` in the `text_config` of a supported text backbone."""


TEXT_BACKBONES = {
    "Gemma3ForConditionalGeneration": TextBackbone("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": TextBackbone("MistralForCausalLM", "mistral"),
}
"""Multimodal architectures that are served as text models."""
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of text tensors, mapped to the prefixes of the text model alone.

Published folders have the first two; transformers writes the third since 4.52, and `lm_head` unchanged.
"""
_OTHER_PREFIXES = ("vision_tower.", "vision_model.", "multi_modal_projector.")
"""Name prefixes of other tensors, with or without a leading `model.`."""


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model alone.

    name: in the multimodal checkpoint. Returns None for tensors outside the text backbone. Other names are returned
    unchanged.
    """
    if name.removeprefix("model.").startswith(_OTHER_PREFIXES):
        return None
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
