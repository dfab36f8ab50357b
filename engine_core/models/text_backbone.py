"""The text halves of multimodal checkpoints.

They have families of their own, and other names of tensors.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextBackbone:
    """The text half of a multimodal architecture."""

    architecture: str
    """The architecture of the text half by itself."""
    model_type: str
    """The `model_type` in the `text_config` of a supported text half."""


TEXT_HALVES = {
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
_OTHER_HALVES = ("vision_tower.", "vision_model.", "multi_modal_projector.")
"""Beginnings of the names of tensors of other halves, behind `model.` or not."""


def text_name(name: str) -> str | None:
    """Return the name that a tensor has in the text model by itself.

    name: that in the multimodal checkpoint. None: the tensor belongs to another half. Any other name is returned
    unchanged.
    """
    if name.removeprefix("model.").startswith(_OTHER_HALVES):
        return None
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
