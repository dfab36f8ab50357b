"""Mixture of experts as the feed-forward network of one layer (Shazeer et al., 2017)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.expert_weights import ExpertWeights
from tandem.engine_core.layers.linear import Norm
from tandem.engine_core.layers.shared_expert import SHARED_MODULE, SharedExpert
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, MoEConfig, layer_prefix


class RoutingSwitch:
    """Switch from a model's routing to a uniform one, for measurements.

    Kernels read it from device memory, so it also switches captured graphs. With uniform routing a step of padding
    costs about as much as one with the tokens of a trained model; otherwise padding is not routed and costs nothing.
    """

    def __init__(self, flag: Tensor) -> None:
        """Store the flag.

        flag: [1] int32 on the model's device, 0.
        """
        self.flag = flag

    @classmethod
    def build(cls, device: torch.device) -> Self:
        """Allocate a switch."""
        return cls(torch.zeros(1, dtype=torch.int32, device=device))

    @contextmanager
    def uniform(self) -> Iterator[None]:
        """Route all tokens uniformly, including padding, in the steps launched in this context."""
        self.flag.fill_(1)
        try:
            yield
        finally:
            self.flag.zero_()


class MixtureOfExperts:
    """Feed-forward network whose router chooses `top_k` experts for each token."""

    def __init__(
        self,
        router: Tensor,
        experts: ExpertWeights,
        top_k: int,
        routing: Routing,
        projections: tuple[str, str, str],
        switch: RoutingSwitch,
        seed: int,
        kernels: KernelSet,
        shared: SharedExpert | None = None,
        stacks_shared: bool = False,
    ) -> None:
        """Store the parts of a network.

        router: weight, [E, hidden], in the model's dtype or float32; top_k: number of experts per token; projections:
        names of an expert's gate, up and down projections; seed: of uniform routing, different in each layer;
        shared: the expert that all tokens use, None if there is none, or if it is the last one of `experts`;
        stacks_shared: whether it is. The last row of the router, which has one more, is its gate then.
        """
        self.router = router
        self.experts = experts
        self.top_k = top_k
        self.routing = routing
        self.projections = projections
        self.switch = switch
        self.seed = seed
        self.kernels = kernels
        self.shared = shared
        self.stacks_shared = stacks_shared

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        moe: MoEConfig,
        layer: int,
        switch: RoutingSwitch,
        context: BuildContext,
    ) -> Self:
        """Allocate a network with uninitialized weights.

        A shared expert of the same width and format as the others is stored with them, so that it needs no launches of
        its own. layer: index of the layer.
        """
        name, sizes = f"{layer_prefix(layer)}{moe.module}", (moe.experts, config.hidden_size, moe.width)
        modules = f"{name}.{SHARED_MODULE}", f"{name}.experts"
        is_alike = moe.shared_width == moe.width and not config.mlp_bias
        stacks = is_alike and context.has_format_of_experts(*modules, moe.projections)
        experts = context.experts(modules[1], *sizes, config.activation, moe.projections, int(stacks))
        dtype = context.own_dtype(f"{name}.gate.weight")
        if stacks:
            dtype = torch.promote_types(dtype, context.own_dtype(f"{modules[0]}_gate.weight"))
        router = torch.empty(moe.experts + stacks, config.hidden_size, device=context.device, dtype=dtype)
        shared = None
        if moe.shared_width and not stacks:
            shared = SharedExpert.build(config, moe.shared_width, f"{name}.", context)
        given = moe.top_k, moe.routing, moe.projections, switch, layer, context.kernels
        return cls(router, experts, *given, shared, stacks)

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        norm: Norm,
        rows: Tensor | None = None,
        adapters: AdapterTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, both [T, hidden].

        update, residual, norm: as in `GatedMLP.__call__`; rows: as in `ForwardBatch`; padding is not routed; adapters:
        of the shared expert, those of others are not supported.
        """
        assert norm.update_weight is None, "the norm before a router is a plain RMSNorm"
        given = update, residual, norm.weight, norm.eps, self.router, self.top_k, self.routing
        sizes = len(update), self.top_k + self.stacks_shared
        needs = (to := self.experts.input_format(*sizes)), self.experts.needs_sorted(*sizes), self.stacks_shared
        route = self.kernels.norm_and_route
        normed, stream, routed, quantized = route(*given, self.switch.flag, rows, self.seed, *needs)
        shared = None if self.shared is None else self.shared.run(normed, adapters, quantized, to)
        return self.experts.run(normed, routed, shared, quantized), stream

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        experts = len(self.router) - self.stacks_shared
        router = WeightSlot(f"{prefix}gate.weight", self.router, 0, 0, experts)
        if self.stacks_shared:
            gate = WeightSlot(f"{prefix}{SHARED_MODULE}_gate.weight", self.router, 0, experts, 1)
            return [router, gate, *self.experts.slots(prefix, self.projections, SHARED_MODULE)]
        shared = [] if self.shared is None else self.shared.slots(prefix)
        return [router, *self.experts.slots(prefix, self.projections), *shared]
