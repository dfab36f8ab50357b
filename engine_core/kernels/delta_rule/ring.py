"""Access to the ring of a row: the keys, updates and decays of the tokens since its base.

Layouts are those of `DeltaRuleState`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def ring_pointers(
    updates_ptr,
    keys_ptr,
    decays_ptr,
    row,
    head,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
):
    """Return pointers to the updates, keys and decays of a value head of a row. row: int64."""
    key_head = head // (HEADS // KEY_HEADS)
    return (
        updates_ptr + (row * HEADS + head) * U * V,
        keys_ptr + (row * KEY_HEADS + key_head) * 2 * R * K,
        decays_ptr + (row * HEADS + head) * 2 * R,
    )


@triton.jit
def tokens_in_ring(position, R: tl.constexpr):
    """Return how many tokens before a position the ring holds; the base covers those before them."""
    return tl.where(position > 0, (position + R - 1) % R + 1, 0)


@triton.jit
def fold_ring(
    base,
    updates_ptr,
    keys_ptr,
    decays_ptr,
    position,
    k_index,
    v_index,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
    K_AXIS: tl.constexpr,
):
    """Return the state after the tokens before a position, from a base and the ring.

    base: [K, V] if K_AXIS is 0, [V, K] if it is 1, or a part of it with the indices k_index and v_index.
    """
    total = tl.load(decays_ptr + (position + 2 * R - 1) % (2 * R), mask=position > 0, other=0.0)
    state = base * tl.exp(total)
    for back in tl.range(1, tokens_in_ring(position, R) + 1, num_stages=4):
        at = position - back
        weight = tl.exp(total - tl.load(decays_ptr + at % (2 * R)))
        key = tl.load(keys_ptr + (at % (2 * R)) * K + k_index).to(tl.float32) * weight
        update = tl.load(updates_ptr + (at % U) * V + v_index)
        state += tl.expand_dims(key, 1 - K_AXIS) * tl.expand_dims(update, K_AXIS)
    return state
