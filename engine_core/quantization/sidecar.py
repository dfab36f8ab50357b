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


def as_quantization_config(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of such a file as a `quantization_config` of config.json.

    name: of the file.
    """
    inner = content.get("quantization") if name == "hf_quant_config.json" else content
    return {"quant_method": SIDECARS[name], **(inner if isinstance(inner, Mapping) else content)}
