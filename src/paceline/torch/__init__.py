"""Balanced data-parallel training with torch: the handle for your own loop, and a clean start and end."""

import os as _os
import signal as _signal
import sys as _sys

from paceline.errors import PacelineError

try:
    # While Python loads ``-m paceline.torch.launcher``, Ctrl-C ends it without the traceback of an import.
    _loads = _sys.argv[:1] == ["-m"] and f"{__name__}.launcher" in _sys.orig_argv
    if _loads := _loads and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: _os._exit(130))
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - where the extra is not installed
    raise PacelineError("PyTorch is not installed; install paceline[torch]") from error

from paceline.rounds import RoundResult
from paceline.torch.liveness.shutdown import join, leave
from paceline.torch.local import Merge
from paceline.torch.measuring.recorder import Recorder
from paceline.torch.pace import Pace

if _loads:
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)

__all__ = ["Merge", "Pace", "Recorder", "RoundResult", "join", "leave"]
