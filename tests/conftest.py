"""For all tests: no deadlines (they tell how busy a machine is), no name server; Ctrl-C reaches what they start.

A shell or a runner may have started the tests with SIGINT ignored, and what they start would ignore it, too.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import is_hypothesis_test, settings

from support import forks, ray_forks
from support.often import times
from support.skips import listed

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A TCPStore asks for the names of the addresses that connect to it, before it serves them. Where a name server leaves
# questions open, each such question takes five seconds. The tests need no names but those of the machine itself, and
# what PyTorch logs of a name that it did not learn is no business of those who read what a command prints.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# One thread for each process: several run at once, and threads that wait for their turn spin. (This must be said
# before numpy and torch are loaded.) And ranks on this machine meet over its loopback.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# The programs of this environment are on the PATH, as where it is activated: printed commands begin with their names.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])

# Hundreds of processes import Paceline: each would compile it for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ray gives its workers the lowest priority but four: beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

# What is imported and collected stays to the end: to search it for garbage is two fifths of a start's processor time.
gc.disable()

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


@pytest.fixture
def warm() -> Iterator[None]:
    """The Python programs that a test starts are forks of the server, which has PyTorch loaded."""
    with forks.warm():
        yield


@pytest.fixture(scope="session")
def forks_of_ray():
    """The one process that the workers of each Ray are forked from where ``ray_forks.use`` was called."""
    with ray_forks.server():
        yield ray_forks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hypothesis draws as many of each test's examples as ``support.often`` says."""
    drawn = {function for item in items if is_hypothesis_test(function := getattr(item, "obj", None))}
    for function in drawn:
        if asked := getattr(function, "_hypothesis_internal_use_settings", None):
            function._hypothesis_internal_use_settings = settings(
                asked, max_examples=times(asked.max_examples)
            )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file of tests leaves stays, if it is no garbage: the time of a collection would grow with it."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped, why, and how to run it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped: how to run them")
        for line in listed(skipped):
            terminalreporter.line(line)
