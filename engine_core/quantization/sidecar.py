"""Quantization described in a separate file next to config.json.

Written by older AutoGPTQ and AutoAWQ, and NVIDIA's ModelOpt.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.protocol.model_folder import QUANTIZATION_FILES


def find_sidecar(directory: Path) -> Path | None:
    """Return the first such file of a model folder."""
    found = (directory / name for name in QUANTIZATION_FILES)
    return next((path for path in found if path.is_file()), None)


def as_quantization_config(name: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert the content of such a file to a `quantization_config` of config.json.

    None for a file of another tool, and for unquantized weights. name: of the file.
    """
    of_modelopt = QUANTIZATION_FILES[name] == "modelopt"
    found = content.get("quantization", content) if of_modelopt else content
    if not isinstance(found, Mapping):
        return None
    described = found.get("quant_algo") if of_modelopt else found.get("bits", found.get("w_bit"))
    method = found.get("quant_method") or QUANTIZATION_FILES[name]
    return None if described is None else {**found, "quant_method": method}
