"""Quantization of a checkpoint, from its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.quantization.fields import Fields, check_unquantized
from tandem.engine_core.quantization.formats import awq, compressed_tensors, fp8, gptq, modelopt
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Scheme

READERS: Mapping[str, Callable[[Fields], Scheme | None]] = {
    "fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
}
"""Readers by `quant_method`."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "rotation": ("",),
    "adapter": ({},),
    "transform_config": ({}, {"config_groups": {}}),
    "is_marlin_format": (False,),
}
"""Fields that change the meaning of any method's tensors, with the values that do not."""


def read_quantization(quantization: Mapping[str, Any] | None, layers: int) -> Quantization | None:
    """Return the quantization of a model's linear layers, None if they are not quantized.

    quantization: the `quantization_config` of config.json, None if missing; layers: number of layers. Raises
    ConfigError for an unsupported quantization, listing the supported ones.
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
    scheme = reader(fields)
    if scheme is None:
        return None
    check_unquantized(fields.names("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"), layers)
    return Quantization(scheme)
