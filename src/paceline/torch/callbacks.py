"""Callbacks of a ``Pace``: the run's record, trackers, metrics, and functions of your own.

    pace = Pace(ddp, 256, callbacks=[Record("runs/mine"), Prometheus(9100), OnRound(print)])

A callback of your own is a subclass of ``Callback`` with the methods that it needs. Callbacks run in the order of the
list. Give the same list on every rank: those that write or serve do so on rank 0 alone.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paceline import runs
from paceline.errors import PacelineError, short, whole
from paceline.rounds import RoundResult
from paceline.runs import sinks
from paceline.torch import peers, timing

__all__ = [
    "Callback",
    "GarbageCollection",
    "MLflow",
    "OnRound",
    "Prometheus",
    "Record",
    "StopOnNan",
    "TensorBoard",
    "Trackio",
    "Training",
    "Wandb",
]


@dataclass(frozen=True)
class Training:
    """A run that begins.

    Attributes:
        config: The policy, workers, global batch and loop of the run, by name.
        place: The directory of the run's record; "training" if it is not recorded. Its name is the run's name.
        rank: The rank of this process.
    """

    config: Mapping[str, Any]
    place: Path
    rank: int


class Callback:
    """Takes part in a run. Override the methods that you need; each is called on every rank.

    An exception in a method ends the loop of this rank, and so the run.
    """

    only_rank_0 = False  # it acts on rank 0 alone, so it does not survive the loss of that rank

    def on_start(self, training: Training) -> None:
        """The run begins. A PacelineError on any rank is raised on all ranks."""

    def on_round(self, result: RoundResult) -> None:
        """All ranks have reported a round."""

    def on_nan(self, step: int, ranks: list[int]) -> None:
        """The loss of these ranks was NaN or infinite in round ``step``. Without a callback that overrides this,
        rank 0 warns once."""

    def on_epoch(self, epoch: int) -> None:
        """Epoch ``epoch``, counted from 0, is over."""

    def on_members(self, change: Any) -> None:
        """Ranks were lost, left or joined: ``change`` is a ``paceline.torch.Mended``."""

    def on_close(self) -> None:
        """The run is over, or has failed."""


def overriding(callbacks: Sequence[Callback], method: str) -> list[Callable[..., None]]:
    """The bound methods of the callbacks that override this method of ``Callback``."""
    plain = getattr(Callback, method)
    return [getattr(each, method) for each in callbacks if getattr(type(each), method) is not plain]


def start(callbacks: Sequence[Callback], config: Mapping[str, Any]) -> None:
    """Start all callbacks; if one raises PacelineError on any rank, all ranks raise it, and none stays started.
    Collective."""
    places = [each.run_dir for each in callbacks if isinstance(each, Record)]
    training = Training(config, places[0] if places else Path("training"), peers.rank())
    started: list[Callback] = []

    def begin() -> None:
        for each in callbacks:
            each.on_start(training)
            started.append(each)

    try:
        peers.together(begin)
    except PacelineError:
        close(started)
        raise


def close(callbacks: Sequence[Callback]) -> None:
    """Close all callbacks, the last one first, even if one of them raises an exception."""
    with ExitStack() as stack:
        for each in callbacks:
            stack.callback(each.on_close)


class Record(Callback):
    """Writes the run's record, for ``paceline report``, ``paceline watch`` and ``paceline whatif``.

    Args:
        run_dir: A new directory. Rank 0 writes it.
    """

    only_rank_0 = True

    def __init__(self, run_dir: str | Path) -> None:
        if not isinstance(run_dir, str | Path):
            raise PacelineError(f"Record({short(run_dir)}): expected the path of a new directory")
        self.run_dir = Path(run_dir)
        self._recorder: runs.Recorder | None = None

    def on_start(self, training: Training) -> None:
        if training.rank == 0:
            self._recorder = runs.Recorder.create(self.run_dir, {"engine": "torch", **training.config})

    def on_round(self, result: RoundResult) -> None:
        if self._recorder is not None:
            self._recorder.append(result)

    def on_close(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.finish()
            recorder.close()


class Tracker(Callback):
    """Sends each round to a sink, on rank 0. A sink that fails is warned about once and gets nothing more; training
    continues. The subclasses are the trackers that there are.

    kind: the class of the sink. options: its options, by name.
    """

    only_rank_0 = True

    def __init__(self, kind: type[sinks.Sink], **options: Any) -> None:
        for name, value in options.items():
            if name != "port" and not isinstance(value, str):
                raise PacelineError(f"{type(self).__name__}({name}={short(value)}): expected a text")
        self._kind, self._options = kind, options
        self._sink: sinks.Sink | None = None

    def on_start(self, training: Training) -> None:
        if training.rank == 0:
            self._sink = self._kind(place=training.place, config=dict(training.config), **self._options)

    def on_round(self, result: RoundResult) -> None:
        if self._sink is not None:
            try:
                self._sink.round(
                    round=result.step,
                    seconds=result.seconds,
                    batch=result.batch,
                    loads=result.loads.tolist(),
                    compute=result.compute,
                    loss=result.loss,
                )
            except Exception as error:
                self._sink = None
                words = f"nothing more is sent to {type(self).__name__}, which failed: {error}"
                warnings.warn(words, RuntimeWarning, stacklevel=timing.level())

    def on_close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except Exception as error:
                words = f"{type(self).__name__} failed when it was closed: {error}"
                warnings.warn(words, RuntimeWarning, stacklevel=timing.level())


class Wandb(Tracker):
    """Sends each round to a run in a project of Weights & Biases.

    Args:
        project: The project's name.
        mode: "online", "offline", or "" for the setting of the environment (WANDB_MODE).
    """

    def __init__(self, project: str = "paceline", mode: str = "") -> None:
        super().__init__(sinks.WandbSink, project=project, mode=mode)


class MLflow(Tracker):
    """Sends each round to a run in an experiment of MLflow.

    Args:
        experiment: The experiment's name.
        uri: The tracking server, a folder, or a database such as ``sqlite:///mlflow.db``; "" for the setting of the
            environment (MLFLOW_TRACKING_URI).
    """

    def __init__(self, experiment: str = "paceline", uri: str = "") -> None:
        super().__init__(sinks.MLflowSink, experiment=experiment, uri=uri)


class Trackio(Tracker):
    """Sends each round to a run in a project of Trackio.

    Args:
        project: The project's name; ``trackio show --project NAME`` opens it.
    """

    def __init__(self, project: str = "paceline") -> None:
        super().__init__(sinks.TrackioSink, project=project)


class TensorBoard(Tracker):
    """Writes each round to event files of TensorBoard.

    Args:
        folder: The folder of the files; "" for ``tensorboard`` in the run's directory.
    """

    def __init__(self, folder: str | Path = "") -> None:
        text = str(folder) if isinstance(folder, Path) else folder
        super().__init__(sinks.TensorBoardSink, folder=text)


class Prometheus(Tracker):
    """Serves the run's metrics to Prometheus, on rank 0.

    Args:
        port: The port; 0 takes any free port.
        host: The address to listen on; with "0.0.0.0" other machines can reach it.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__(sinks.PrometheusSink, port=port, host=host)


class OnRound(Callback):
    """Calls a function with the ``RoundResult`` of each round.

    Args:
        function: It is called on every rank.
    """

    def __init__(self, function: Callable[[RoundResult], object]) -> None:
        if not callable(function):
            raise PacelineError(f"OnRound({short(function)}): expected a function that takes a RoundResult")
        self._function = function

    def on_round(self, result: RoundResult) -> None:
        self._function(result)


class StopOnNan(Callback):
    """Raises PacelineError on every rank after a round with a loss that is NaN or infinite."""

    def on_nan(self, step: int, ranks: list[int]) -> NoReturn:
        of = ", ".join(map(str, ranks))
        raise PacelineError(
            f"the loss of rank {of} was not finite in round {step}; lower the learning rate or look for bad values "
            "in the data"
        )


class GarbageCollection(Callback):
    """Runs Python's garbage collection after every k-th round on all ranks together, instead of when the count of one
    rank is full, while all others wait for it.

    Args:
        every: k, in rounds.
    """

    def __init__(self, every: int) -> None:
        whole("GarbageCollection(every)", every, most=2**63 - 1)
        self._every, self._automatic = every, False
        self._collected = -math.inf

    def on_start(self, training: Training) -> None:
        self._automatic = gc.isenabled()
        gc.collect()
        gc.disable()

    def on_round(self, result: RoundResult) -> None:
        if (result.step + 1) % self._every == 0 and not result.ended < self._collected:
            gc.collect()
            self._collected = time.perf_counter()  # once for short rounds that are settled together

    def on_close(self) -> None:
        if self._automatic:
            gc.enable()
