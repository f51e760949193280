"""For all tests: no deadlines (they tell how busy a machine is), no name server; Ctrl-C reaches what they start.

A shell or a runner may have started the tests with SIGINT ignored, and what they start would ignore it, too.
"""

import os
import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A TCPStore asks for the names of the addresses that connect to it, before it serves them. Where a name server leaves
# questions open, each such question takes five seconds. The tests need no names but those of the machine itself, and
# what PyTorch logs of a name that it did not learn is no business of those who read what a command prints.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Ray gives its workers the lowest priority but four: beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
