"""Quantization of a checkpoint: the scheme of each of its linear layers."""

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engine_core.quantization.scheme import Scheme

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Quantization:
    """Schemes of the linear layers of a checkpoint, by module name."""

    scheme: Scheme
    """Scheme of all linear layers except the output head."""

    def __str__(self) -> str:
        return str(self.scheme)

    def scheme_for(self, name: str) -> Scheme | None:
        """Return the scheme of a linear layer, None if it is not quantized.

        name: of the module in the text model, such as "model.layers.3.mlp.down_proj".
        """
        return None if name == HEAD else self.scheme

    def part_schemes(self, name: str, parts: Collection[str]) -> list[Scheme | None]:
        """Return the scheme of each part of a fused projection.

        name: of the fused module, such as "model.layers.3.self_attn.qkv_proj"; parts: last components of the parts'
        names, such as "q_proj".
        """
        prefix = name[: name.rfind(".") + 1]
        return [self.scheme_for(prefix + part) for part in parts]
