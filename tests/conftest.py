"""For all tests: no deadlines, which only tell how busy the machine is; Ctrl-C reaches what they start.

A shell or a runner may have started the tests with SIGINT ignored, and what they start would ignore it, too.
"""

import os
import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray gives its workers the lowest priority but four: beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
