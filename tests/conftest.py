"""Settings of all tests.

Hypothesis has no deadline, because a loaded machine must not fail a test. Interrupts are enabled: a test run started in
a shell's background ignores them, and so would its children, but some tests send them.
"""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tandem", deadline=None, print_blob=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tandem")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
