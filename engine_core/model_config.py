"""The facts of a model, as the engine and the layers use them.

`models.registry.read_config` reads them from a folder; each family in `models` defines how its config.json maps to
them.
"""

from msgspec import Struct

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.rope_config import QueryScaling, RopeConfig


def layer_prefix(index: int) -> str:
    """Return the prefix of the names of a layer's modules and tensors, as in Hugging Face's Llama."""
    return f"model.layers.{index}."


class MoEConfig(Struct, frozen=True, kw_only=True):
    """The mixture of experts of a model's layers."""

    experts: int
    """Number of experts of a layer."""
    top_k: int
    """Number of experts of a token."""
    width: int
    """Inputs of an expert's down projection."""
    routing: Routing
    layers: frozenset[int]
    """Indices of the layers with experts; the others have a dense feed-forward network."""
    module: str = "mlp"
    """Name of the network in a layer of the checkpoint."""
    shared_width: int = 0
    """Inputs of the down projection of the expert that all tokens use, 0 if there is none."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The facts of a decoder-only model."""

    architecture: str
    """The architecture as config.json names it."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    """Maximum positions of a sequence, unless --max-len is set."""
    rms_norm_eps: float
    tie_embeddings: bool
    attention: tuple[LayerAttention, ...]
    """Scale, window, soft cap and rotary table of each layer; unused for `recurrent_layers`."""
    ropes: tuple[RopeConfig, ...]
    """Rotary embeddings; `LayerAttention.rotary` is the index of a layer's."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a sequence: those of generation_config.json, then those that only config.json has."""
    dtype: str | None = None
    """The checkpoint's own dtype as its config names it, such as "bfloat16"."""
    qkv_bias: bool = False
    """True if the projections of queries, keys and values have biases."""
    output_bias: bool = False
    """True if the output projection of attention has a bias."""
    mlp_bias: bool = False
    """True if the projections of the feed-forward networks have biases."""
    query_scaling: QueryScaling | None = None
    """Scaling of queries by their position, None: there is none."""
    output_gate: bool = False
    """True if the output of attention is multiplied by the sigmoid of a gate."""
    recurrent_layers: tuple[int, ...] = ()
    """Indexes of the layers that have a gated delta rule in place of attention, and no keys and values."""
    delta_rule: DeltaRuleShape | None = None
    """Sizes of these layers."""
    qk_norm: bool = False
    """True if each query and key head is normalised before the rotary embedding."""
    qkv_clip: float | None = None
    """Maximum absolute value of queries, keys and values before the rotary embedding; None: they are not clipped."""
    activation: Activation = Activation.SILU
    """Activation of the gate in the feed-forward networks."""
    final_softcap: float | None = None
    """Bound c of the logits z, which become c * tanh(z / c). None: they stay as they are."""
    quantization: Quantization | None = None
    """Formats of the linear layers; None: they are not quantized."""
    moe: MoEConfig | None = None
    """Mixture of experts; None: all layers are dense."""
    longest_context: int = 0
    """Largest --max-len where the rotary scaling can be stretched beyond `max_positions`; 0: it cannot."""
    multimodal: bool = False
    """True for the text backbone of a multimodal checkpoint; its other tensors are ignored."""
    family: str = ""
    """Architecture of the family that builds the model; empty: `architecture`. Multimodal ones differ."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.attention)

    @property
    def projection_weights(self) -> int:
        """Weights of the projections of all layers, which memory holds."""
        return self._count_weights(0 if self.moe is None else self.moe.experts)

    @property
    def active_weights(self) -> int:
        """Weights of the projections of all layers that one token is multiplied by."""
        return self._count_weights(0 if self.moe is None else self.moe.top_k)

    def _count_weights(self, experts: int) -> int:
        """Count the weights of all layers' projections. experts: number that is counted of a layer."""
        heads, kv_heads = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mixing = len(self.attention_layers) * ((2 + self.output_gate) * heads + 2 * kv_heads)
        if (shape := self.delta_rule) is not None:
            mixing += len(self.recurrent_layers) * (shape.channels + 2 * shape.values + 2 * shape.value_heads)
        if self.moe is None:
            return self.hidden_size * (mixing + self.layers * 3 * self.intermediate_size)
        sparse = len(self.moe.layers)
        shared = 3 * self.moe.shared_width + (self.moe.shared_width > 0)
        networks = sparse * (3 * experts * self.moe.width + self.moe.experts + shared)
        return self.hidden_size * (mixing + networks + (self.layers - sparse) * 3 * self.intermediate_size)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indexes of the layers with attention."""
        return tuple(index for index in range(self.layers) if index not in self.recurrent_layers)

    def recurrent_row_bytes(self, itemsize: int, max_drafts: int = 0) -> int:
        """Return the bytes of one row's state in all layers. itemsize: of the model's dtype."""
        if self.delta_rule is None:
            return 0
        return len(self.recurrent_layers) * self.delta_rule.row_bytes(itemsize, max_drafts=max_drafts)

    def checkpoint_bytes(self, itemsize: int) -> int:
        """Return the bytes of one checkpoint of the state of all layers. itemsize: of the model's dtype."""
        return 0 if self.delta_rule is None else len(self.recurrent_layers) * self.delta_rule.checkpoint_bytes(itemsize)

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of all weights, about.

        A quantized projection has one for each weight.

        itemsize: bytes of an element that is not quantized.
        """
        projections = self.projection_weights * (itemsize if self.quantization is None else 1)
        return projections + (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size * itemsize

    @property
    def attention_kinds(self) -> tuple[LayerAttention, ...]:
        """The distinct kinds of attention among the layers.

        A step is planned once for each.
        """
        return tuple(dict.fromkeys(self.attention[index] for index in self.attention_layers))
