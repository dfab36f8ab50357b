"""What holds for every test.

Hypothesis looks for wrong answers, not for slow ones: a loaded machine must not fail a test. And a test run from a
shell's background ignores interrupts, as would all its children; some tests are about them.
"""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tandem", deadline=None, print_blob=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tandem")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
