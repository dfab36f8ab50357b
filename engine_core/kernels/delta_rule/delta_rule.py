"""The gated delta rule of a step, by the kernels for single tokens, for drafts and for pieces of rows."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.chunked import chunked
from tandem.engine_core.kernels.delta_rule.single_tokens import single_tokens
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, Pieces, TokenRows
from tandem.engine_core.kernels.delta_rule.verified_tokens import verified_tokens


def delta_rule(
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    shape: DeltaRuleShape,
    state: DeltaRuleState,
    tokens: TokenRows,
    pieces: Pieces | None,
    pdl: bool = False,
) -> Tensor:
    """Run the gated delta rule over each row's tokens and update its memory; see `reference.delta_rule.delta_rule`.

    The result is undefined for padding.
    """
    out = torch.empty(len(qkv), shape.value_heads, shape.value_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens.queries > 1:
        verified_tokens(out, qkv, gates, a_log, dt_bias, shape, state, tokens, pdl)
    elif tokens.num_single:
        single_tokens(out, qkv, gates, a_log, dt_bias, shape, state, tokens, pdl)
    if pieces is not None:
        chunked(out, qkv, gates, a_log, dt_bias, shape, state, tokens, pieces, pdl)
    return out
