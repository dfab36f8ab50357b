"""Quantization that a tool describes in a file beside config.json.

Older AutoGPTQ and AutoAWQ do so, and NVIDIA's ModelOpt.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIDECARS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Names of such files, with the `quant_method` that they stand for."""


def find_sidecar(directory: Path) -> Path | None:
    """Return the first such file of a model folder."""
    found = (directory / name for name in SIDECARS)
    return next((path for path in found if path.is_file()), None)


def as_quantization_config(name: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of such a file as a `quantization_config` of config.json.

    It is None for a file of another tool, and of weights that are not quantized. name: of the file.
    """
    found = content.get("quantization", content) if name == "hf_quant_config.json" else content
    if not isinstance(found, Mapping):
        return None
    method, described = found.get("quant_method") or SIDECARS[name], found.get("bits", found.get("w_bit"))
    if name == "hf_quant_config.json":
        described = found.get("quant_algo")
    return None if described is None else {**found, "quant_method": method}
