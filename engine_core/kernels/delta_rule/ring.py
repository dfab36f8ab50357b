"""Access to the ring of a row: the keys, updates and decays of the tokens since its base.

Layouts are those of `DeltaRuleState`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: N803, RUF005

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(2)
"""Tokens of a ring that are loaded at once. With four, one program less fits on an SM of an H200."""


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
    count = tokens_in_ring(position, R)
    total = tl.load(decays_ptr + (position + 2 * R - 1) % (2 * R), mask=count > 0, other=0.0)
    state = base * tl.exp(total)
    for first in range(0, count, AT_ONCE):
        # Loads of several tokens are under way at once.
        decays = ()
        keys = ()
        updates = ()
        for more in tl.static_range(AT_ONCE):
            at, held = position - 1 - first - more, first + more < count
            decays = decays + (tl.load(decays_ptr + at % (2 * R), mask=held, other=float("inf")),)
            key_ptr, update_ptr = keys_ptr + (at % (2 * R)) * K + k_index, updates_ptr + (at % U) * V + v_index
            keys = keys + (tl.load(key_ptr, mask=held & (k_index >= 0), other=0.0),)
            updates = updates + (tl.load(update_ptr, mask=held & (v_index >= 0), other=0.0),)
        for more in tl.static_range(AT_ONCE):
            key = keys[more].to(tl.float32) * tl.exp(total - decays[more])
            state += tl.expand_dims(key, 1 - K_AXIS) * tl.expand_dims(updates[more], K_AXIS)
    return state
