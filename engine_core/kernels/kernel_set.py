"""Which implementation of each fused operation a model runs with, decided once when it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tandem.engine_core.kernels.reference import layer


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Functions with the signatures and the meaning of `kernels.reference.layer`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope_and_kv_write: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float], Tensor
    ]
    """With the norms of queries and keys, where the model has them."""
    silu_mul: Callable[[Tensor], Tensor]


def torch_kernels() -> KernelSet:
    """The oracles, on any device."""
    return KernelSet(
        layer.rms_norm,
        layer.add_rms_norm,
        layer.qk_norm_rope_and_kv_write,
        layer.silu_mul,
    )


def triton_kernels() -> KernelSet:
    """One launch each, chained by programmatic dependent launch: a kernel's prologue overlaps its predecessor's end."""
    from tandem.engine_core.kernels.activation import silu_mul
    from tandem.engine_core.kernels.norm import add_rms_norm, rms_norm
    from tandem.engine_core.kernels.rope import rope_and_kv_write

    return KernelSet(
        partial(rms_norm, pdl=True),
        partial(add_rms_norm, pdl=True),
        partial(rope_and_kv_write, pdl=True),
        partial(silu_mul, pdl=True),
    )
