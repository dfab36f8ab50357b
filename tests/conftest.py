"""Hypothesis looks for wrong answers, not for slow ones: a loaded machine must not fail a test."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tandem", deadline=None, print_blob=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tandem")
