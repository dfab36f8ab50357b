"""Quantization of a checkpoint, from its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.quantization.fields import Fields, unsupported
from tandem.engine_core.quantization.formats import auto_round, awq, compressed_tensors, fp8, gptq, modelopt
from tandem.engine_core.quantization.name_pattern import PatternError
from tandem.engine_core.quantization.quantization import Quantization

READERS: Mapping[str, Callable[[Fields], Quantization | None]] = {
    "fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "auto-round": auto_round,
}
"""Readers by `quant_method`."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "rotation": ("",),
    "adapter": ({},),
    "transform_config": ({}, {"config_groups": {}}),
    "is_marlin_format": (False,),
}
"""Fields that change the meaning of any method's tensors, with the values that do not."""


def read_quantization(quantization: Mapping[str, Any] | None) -> Quantization | None:
    """Return the quantization of a model's linear layers by its config alone, None if they are not quantized.

    quantization: the `quantization_config` of config.json, None if missing. Raises ConfigError for an unsupported
    quantization, listing the supported ones.
    """
    if quantization is None:
        return None
    fields = Fields(quantization, "quantization_config")
    method = fields.get("quant_method", "unknown")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        names = ", ".join(READERS)
        raise ConfigError(
            f'quantization_config with quant_method "{method}" is not supported (supported: {names}): '
            "serve another quantization of the model, or the unquantized checkpoint"
        )
    for name, neutral in NEUTRAL.items():
        if fields.get(name) not in (None, *neutral):
            raise fields.error(name, "false" if neutral == (False,) else "none")
    try:
        return reader(fields)
    except PatternError as error:
        raise unsupported(
            f'quantization_config has an invalid regular expression, or one that is slow to match, "{error}"'
        ) from None
