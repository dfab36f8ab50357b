"""Hypothesis strategies for the rotary fields of config.json, one for each rope_type."""

from typing import Any

from hypothesis import strategies as st

ORIGINAL, EXTENDED = 4096, 32768
"""The original and the full number of positions of a model with these fields."""


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, width=32)


FACTOR = numbers(1, 64)


def fields_of(kind: str, pairs: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of `rope_parameters` for one kind, complete and valid. pairs: that turn in a head."""
    factors = st.lists(numbers(1, 60), min_size=pairs, max_size=pairs)
    fields: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "default": {},
        "linear": {"factor": FACTOR},
        "dynamic": {"factor": FACTOR},
        "llama3": {"factor": FACTOR, "low_freq_factor": numbers(0.5, 2), "high_freq_factor": numbers(3, 8)},
        "yarn": {"factor": FACTOR},
        "longrope": {"short_factor": factors, "long_factor": factors},
        "proportional": {"factor": FACTOR},
    }
    optional: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "yarn": {
            "attention_factor": numbers(0.5, 2),
            "beta_fast": numbers(16, 48),
            "beta_slow": numbers(0.5, 4),
            "mscale": numbers(0.5, 1.5),
            "mscale_all_dim": numbers(0.5, 1.5),
            "truncate": st.booleans(),
        },
        "longrope": {"attention_factor": numbers(0.5, 2), "factor": FACTOR},
    }
    common = {"rope_type": st.just(kind), "rope_theta": numbers(100, 1e7)}
    if kind in ("llama3", "yarn", "longrope"):
        common["original_max_position_embeddings"] = st.just(ORIGINAL)
    return st.fixed_dictionaries(common | fields[kind], optional=optional.get(kind, {}))
