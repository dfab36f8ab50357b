"""Qwen 3.5, 3.6 and 3.8, the dense models: hybrids of attention and Gated DeltaNet (Yang et al., 2025).

Three of four layers have a gated delta rule in place of attention. All norms but that of the delta rule multiply by 1
plus the stored weight.
"""

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.hybrid_block import HybridBlock
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.hybrid_fields import HybridFields, resolve_hybrid


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    return resolve_hybrid(source, source.read(HybridFields))


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [HybridBlock.build(config, index, context) for index in range(config.layers)]
    norm = RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)
    return Decoder.build(config, max_positions, context, blocks, norm)
