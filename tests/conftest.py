# SPDX-License-Identifier: Apache-2.0
"""For all tests: nothing depends on how fast the machine is, or on who started them."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A shell that runs tests in the background has them, and all that they start, ignore
# interrupts; some of them are about interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
