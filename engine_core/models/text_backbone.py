"""The text backbones of multimodal checkpoints, and the tensors of a checkpoint that no text model reads."""

from tandem.engine_core.quantization.module_names import text_model_name

TEXT_BACKBONES = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Multimodal architectures that are served as text models: the architecture of the text backbone alone, by the
`model_type` in the `text_config`."""
_MULTI_TOKEN = ("mtp",)
"""First components, after an optional `model.`, of the names of tensors of multi-token prediction."""
_OTHER_MODALITIES = (
    "visual", "vision_tower", "vision_model", "embed_vision", "audio_tower", "embed_audio", "multi_modal_projector",
)  # fmt: skip
"""First components of the names of tensors of other modalities, likewise."""


def names_other_modules(entry: str) -> bool:
    """Return whether an entry of a quantization config names modules that no text model has.

    Releases list those of other modalities and of multi-token prediction even if they lack them.
    """
    return any(first in entry for first in (*_MULTI_TOKEN, *_OTHER_MODALITIES))


def dropping_rule(name: str, multimodal: bool) -> str | None:
    """Return the rule by which a tensor is not read, such as "mtp.*", None for those of the text model.

    name: that in the checkpoint; multimodal: whether the architecture has other modalities.
    """
    first = name.removeprefix("model.").partition(".")[0]
    dropped = first in _MULTI_TOKEN or (multimodal and first in _OTHER_MODALITIES)
    return f"{first}.*" if dropped else None


def dropped_names() -> list[str]:
    """Return a tensor name for each rule of `dropping_rule`."""
    return [
        f"{prefix}{first}.layers.0.proj.weight"
        for first in (*_MULTI_TOKEN, *_OTHER_MODALITIES)
        for prefix in ("", "model.")
    ]


def text_name(name: str, multimodal: bool) -> str | None:
    """Return the name that a tensor has in the text model alone, None if it is not read.

    name, multimodal: as in `dropping_rule`.
    """
    return None if dropping_rule(name, multimodal) is not None else text_model_name(name)
